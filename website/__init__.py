"""The documentation site: what is generated from the code and its configurations, and how pages get there."""
