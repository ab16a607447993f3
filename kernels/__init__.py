"""The project's `jaxrl.kernels`: it stands at the top level of the repository and is imported through `jaxrl`.

A bare top-level `kernels` is refused: other distributions publish packages under such names, so an import that
happened to find this folder first would break them, or us.
"""

if __name__ != "jaxrl.kernels":
    raise ImportError("`kernels` is part of jaxrl: import it as `jaxrl.kernels`")
