"""Messages between server and nodes: their fields, their bytes, and the settings that both must share."""
