"""The commands behind `jaxrl`: the places where a run is put together and goes."""
