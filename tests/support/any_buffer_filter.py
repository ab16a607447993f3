"""A buffer filter of no plan: each group goes on, waits, or starts again, in an order of its own."""


def buffer_filter(groups, policy_version):
    def number(group):
        epoch, index = group.key
        return hash((epoch, index, group.steps_waited, sum(group.lengths), policy_version)) % 1009

    actions = ("resume", "resume", "wait", "restart", None)
    chosen = {group.key: actions[number(group) % 5] for group in sorted(groups, key=number)}
    return {key: action for key, action in chosen.items() if action is not None}
