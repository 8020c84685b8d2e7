"""The narrow port to the API server and its implementation over `kubernetes.aio`."""
