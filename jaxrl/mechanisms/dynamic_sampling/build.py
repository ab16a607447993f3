"""Dynamic sampling from its options: a function of the user's may say which groups are kept."""

from jaxrl.config import Config
from jaxrl.config.functions import read_user_file, user_function
from jaxrl.mechanisms.dynamic_sampling.group_filter import FILTER_ARGUMENTS, user_filter
from jaxrl.mechanisms.dynamic_sampling.rule import DynamicSampling


def group_filter(config: Config) -> DynamicSampling | None:
    """The filter, with nothing learnt; None: it is off. Raises ValueError for a file that cannot be used."""
    options = config.algorithm.filter_groups
    if not options.enable:
        return None
    if not options.path:
        return DynamicSampling(options, config.data.gen_batch_size)
    names = "algorithm.filter_groups.path", "algorithm.filter_groups.name"
    file = read_user_file(names[0], options.path)
    function = user_function(names, file, options.name, FILTER_ARGUMENTS)
    what = f"{names[0]}: {file.path}: {options.name}"
    return DynamicSampling(options, config.data.gen_batch_size, user_filter(function, what))
