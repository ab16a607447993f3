"""A tool for `configs/letters.yaml`: each function of the file is one, if its name does not begin with `_`."""


def count_letters(word: str) -> str:
    """Counts the letters of a word.

    Args:
        word: The word.
    """
    return f"{word} has {len(word)} letters."
