# Drafters whose weights lie in one block of low precision, in a form that products are computed from.
