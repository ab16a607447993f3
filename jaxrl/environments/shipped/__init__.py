"""Environments that come with jaxrl, each a file that `environment.path` names; the same as one of the user's."""
