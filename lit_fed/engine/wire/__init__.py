"""What crosses between processes and machines: payloads, broadcasts, batches, sums."""
