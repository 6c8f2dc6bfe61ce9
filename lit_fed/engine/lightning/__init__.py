"""Lightning's services to a module that a federation trains."""
