"""`ssm_tune` with a fault, for tests: `python -m faulty sft ...` with FAULT=kind and FAULTY_RANK in the environment."""
