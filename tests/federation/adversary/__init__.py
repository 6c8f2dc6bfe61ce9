"""An adversary: a server that sends anything, and two worlds of nodes that must answer it alike."""
