"""The tier of a tensor: roles, rules, decorators. Allocation on it: resources, pools, torch's hook."""
