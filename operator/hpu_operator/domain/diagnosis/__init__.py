"""Why a pod or a group does not answer. Pure."""
