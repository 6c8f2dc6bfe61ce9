"""Payloads, broadcasts, batches and sums between processes and machines, and the devices they run on."""
