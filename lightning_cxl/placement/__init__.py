"""What goes where, tensor by tensor: roles, decorators, rules, and the policy that is asked."""
