"""The story that `make demo` tells, in parts that the end-to-end test uses as well."""
