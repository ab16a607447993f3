"""A plan in the making: what `jaxrl.scheduling.tokens.batcher` has put into it so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxrl.scheduling.tokens.blocks import BlockManager
from jaxrl.scheduling.tokens.plan import DecodeRow, PrefillChunk
from jaxrl.scheduling.tokens.progress import Named


@dataclass(slots=True)
class PlanBuilder:
    """The pieces of a plan, and what is left for more of them."""

    budget: list[int]  # prefill tokens left, per dp group
    headroom: list[int]  # blocks that the rows of each dp group may want in the next plan
    room: list[int] = field(default_factory=list)  # how much room each dp group has, while requests are let in
    closed: set[int] = field(default_factory=set)  # dp groups that let no request in
    lacks_budget: bool = False  # a prefill waits for the next plan
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)

    def put_off_decode(self) -> None:
        """Takes decode rows out of the plan; prefill stays."""
        assert self.prefill, "prefill budget is lacking because another request has it"
        self.decode = []
        prefilled = {chunk.request.request_id for chunk in self.prefill}
        self.named = [
            replace(named, max_new=int(named.ends_prefill))
            for named in self.named
            if named.progress.request.request_id in prefilled
        ]

    def fullest(self) -> tuple[int, int]:
        """The most decoding rows of a dp group, and the most tokens that those of one may have before the plan."""
        rows, tokens = [0] * len(self.budget), [0] * len(self.budget)
        for named in self.named:
            if named.max_new > named.ends_prefill:
                rows[named.dp_group] += 1
                tokens[named.dp_group] += named.progress.num_written + 1
        return max(rows), max(tokens)

    def give_room(self, blocks: BlockManager, most: int) -> None:
        """Lets rows with a history gain up to `most` tokens, as far as blocks are free that no row may want in the next
        plan; the oldest first. No row loses its place for what is proposed for another."""
        decoding = {row.request_id: i for i, row in enumerate(self.decode)}
        for at, named in enumerate(self.named):
            progress, group = named.progress, named.dp_group
            request_id = progress.request.request_id
            if progress.history is None or request_id not in decoding:
                continue
            row = self.decode[decoding[request_id]]
            written = len(progress.prefix) if named.ends_prefill else progress.num_written
            need = min(written + most, progress.limit)
            more = blocks.blocks_for(need) - len(row.block_table)
            first = 0 if named.ends_prefill else progress.first  # this plan's chunk sees more
            if more > blocks.num_free(group) - self.headroom[group] or not blocks.extend(request_id, need, first):
                continue
            table, max_new = blocks.table(request_id), most
            self.decode[decoding[request_id]] = replace(row, block_table=table, max_new=max_new)
            self.named[at] = replace(named, max_new=max_new + named.ends_prefill)
