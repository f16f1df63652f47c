"""The runtime: what executes a rewritten program on devices, host memory and SSDs."""
