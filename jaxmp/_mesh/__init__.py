"""Arrays on the devices of a mesh."""
