"""The tier of a tensor: roles, decorators, rules, and the policy that is asked."""
