"""The loop's backend, the code that builds it, its memory, and its changes of layout."""
