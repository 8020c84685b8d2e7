# `make test` and `make demo` are all a stranger needs; `make help` lists the rest.
