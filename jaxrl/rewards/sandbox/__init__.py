"""Runs programs that a model wrote, and lets none of them do anything but compute.

A `Sandbox` (`client`) has a fork server (`server`): a warm, clean Python process. For each execution the server forks
the program (`program`), and for tests written in Python a second process that runs them, the checker (`suites`). It
keeps their time and memory, and ends them (`supervisor`). Both are locked in before they see any text (`locks`).

No verdict can be forged, because the program's process never holds expected outputs or assertions. It gets inputs, and
a process that it cannot reach reads its answers as plain values (`wire`).

Nothing here imports more than the standard library, but for pytest where tests do: the server starts in milliseconds,
and holds nothing.
"""
