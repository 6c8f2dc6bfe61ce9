"""The server of a federation: it maps clients to nodes, asks them, and checks what they answer."""
