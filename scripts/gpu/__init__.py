"""What jaxrl does on a GPU: compiled for one without having one, and measured on one."""
