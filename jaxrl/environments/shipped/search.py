"""A tool: search in a corpus on this machine, by BM25 (Robertson and Zaragoza 2009), with the package bm25s.

`environment.kind=class environment.path=search environment.name=Search environment.args={corpus: documents.jsonl}`: a
line for each document, an object with its text under `text` and perhaps its title under `title`; the arguments `text`
and `title` name other columns. An index is built once in each process. The tool gives no reward (`get_reward` is 0):
`reward.kind=math` or a function scores the answer.
"""

import functools
import json
from pathlib import Path
from typing import Any

_SHOWN = 600  # characters of a document


class Search:
    """A conversation with the tool."""

    def reset(self, corpus: str, text: str = "text", title: str = "title") -> None:
        self._read = corpus, text, title
        _index(*self._read)

    def search(self, query: str, num_results: int = 3) -> str:
        """Searches the documents and returns the beginnings of those that fit best.

        Args:
            query: Words to search for.
            num_results: How many documents to return, 10 at most.
        """
        import bm25s

        index, documents = _index(*self._read)
        count = max(1, min(num_results, 10, len(documents)))
        tokens = bm25s.tokenize(query, stopwords="en", show_progress=False)
        found, scores = index.retrieve(tokens, k=count, show_progress=False)
        texts = [
            f"[{place}] {documents[number][0]}\n{documents[number][1][:_SHOWN]}".strip()
            for place, (number, score) in enumerate(zip(found[0].tolist(), scores[0].tolist(), strict=True), 1)
            if score > 0
        ]
        return "\n\n".join(texts) or "No document has these words."

    def get_reward(self) -> float:
        return 0.0


@functools.cache
def _index(corpus: str, text: str, title: str) -> tuple[Any, list[tuple[str, str]]]:
    """The index of a file, and its documents with their titles. Raises ValueError for a file without documents."""
    import bm25s

    lines = Path(corpus).expanduser().read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    if not rows or not all(isinstance(row, dict) and isinstance(row.get(text), str) for row in rows):
        raise ValueError(f"{corpus} must hold a line for each document, an object with text under {text!r}")
    documents = [(str(row.get(title) or ""), row[text]) for row in rows]
    index = bm25s.BM25()
    tokens = bm25s.tokenize([" ".join(each) for each in documents], stopwords="en", show_progress=False)
    index.index(tokens, show_progress=False)
    return index, documents
