"""Which groups dynamic sampling keeps, from its options: a function of the user's may say."""

from jaxrl.config import Config
from jaxrl.config.functions import read_user_file, user_function
from jaxrl.scheduling.rounds.group_filter import FILTER_ARGUMENTS, KeepsGroup, user_filter


def keeps_group(config: Config) -> KeepsGroup | None:
    """The user's filter; None: there is none. Raises ValueError for a file that cannot be used."""
    options = config.algorithm.filter_groups
    if not options.enable or not options.path:
        return None
    names = "algorithm.filter_groups.path", "algorithm.filter_groups.name"
    file = read_user_file(names[0], options.path)
    function = user_function(names, file, options.name, FILTER_ARGUMENTS)
    return user_filter(function, f"{names[0]}: {file.path}: {options.name}")
