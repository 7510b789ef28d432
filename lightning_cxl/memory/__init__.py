"""The tier of a tensor: roles, rules, decorators. Bytes on it: resources, pools, torch's hook."""
