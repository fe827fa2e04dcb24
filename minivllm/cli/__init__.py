"""The command line: python -m minivllm."""
