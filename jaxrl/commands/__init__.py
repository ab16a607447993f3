"""The commands behind `jaxrl`: each one puts a run together and carries it out."""
