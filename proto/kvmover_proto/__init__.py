"""Generated messages and stubs of the kvmover API, version 1. Regenerate with `python proto/generate.py`."""
