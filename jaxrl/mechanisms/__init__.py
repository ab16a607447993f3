"""The switches of the README, a room for each. `jaxrl.scheduling.mechanism` says what they share."""
