"""Runs programs that a model wrote, and lets none of them do anything but compute.

A `Sandbox` (`client`) has a fork server (`server`): a warm clean Python process, which forks a supervisor per execution
(`supervisor`). The supervisor forks what runs: the program (`program`), and for tests written in Python a second
process that runs the tests (`checker`). Both are locked in before they see any text (`locks`).

The verdict cannot be forged because the program's process never holds what it would need: neither expected outputs nor
assertions. It is given inputs, and what comes back is taken for plain values (`wire`) by a process that it cannot
reach.

Nothing here imports more than the standard library and small files of `jaxrl.processes`: the server is to start in
milliseconds and to hold nothing.
"""
