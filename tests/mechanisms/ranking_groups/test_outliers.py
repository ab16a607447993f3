"""Which responses of a ranking group are outliers: among the last of it, and longer than its history allows."""

from rounds import key

from jaxrl.mechanisms.ranking_groups.outliers import Outliers, RankedGroup

SHORT = RankedGroup(0, tuple(key(0, i) for i in range(10)), 100.0)
LONG = RankedGroup(1, tuple(key(1, i) for i in range(11)), 500.0)
NEW = RankedGroup(2, (key(2, 0),), None)


def test_both_conditions_must_hold_and_none_is_named_twice():
    books, tokens = Outliers([SHORT, LONG, NEW], share=0.1, factor=1.5), {}

    def take():
        return books.take(lambda k: tokens.get(k, 0))

    tokens |= dict.fromkeys(SHORT.keys, 151)
    assert take() == [], "all of the group still run"
    for k in SHORT.keys[:8]:
        books.ended(k)
    assert take() == [], "two are left, and the last 10 % are one"
    books.ended(SHORT.keys[8])
    tokens[SHORT.keys[9]] = 150
    assert take() == [], "1.5 times the longest, and not beyond"
    tokens[SHORT.keys[9]] = 151
    assert take() == [SHORT.keys[9]]
    assert take() == []
    for k in LONG.keys[:9]:
        books.ended(k)
    tokens |= {LONG.keys[9]: 10_000, LONG.keys[10]: 10_000, NEW.keys[0]: 10_000}
    assert take() == list(LONG.keys[9:]), "of eleven the last two, rounded up; what has no history has no outliers"


def test_what_is_in_no_group_counts_for_nothing():
    books = Outliers([SHORT], share=0.1, factor=1.0)
    books.ended(key(7, 0))
    for k in SHORT.keys:
        books.ended(k)
        books.ended(k)  # told twice: an aborted response that had ended
    assert books.take(lambda k: 10**9) == []
    assert books.rank(SHORT.keys[0]) == 0
