"""A recipe's module that ends its process with status 0 when it is imported."""

import sys

sys.exit(0)
