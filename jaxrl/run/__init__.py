"""What stands behind the loop: the backend, what builds it, its memory, and what changes its layout."""
