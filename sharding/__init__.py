"""The project's `jaxrl.sharding`: it stands at the top level of the repository and is imported through `jaxrl`.

A bare top-level `sharding` is refused: other distributions publish packages under such names, so an import that
happened to find this folder first would break them, or us.
"""

if __name__ != "jaxrl.sharding":
    raise ImportError("`sharding` is part of jaxrl: import it as `jaxrl.sharding`")
