# The images of both programs. Targets: operator, engine-cpu, engine-gaudi.
#
#   docker build --target engine-cpu .
#   docker build --target engine-gaudi --build-arg GAUDI_BASE=<Intel's Gaudi PyTorch image of your driver's release> .
#
# Every target has the same two layers on its base: /opt/venv holds the locked dependencies, /opt/app the project's own
# code (kilobytes), so that a change of code moves kilobytes. Between them engine-cpu has the kernels for processors with
# AMX, compiled in a stage of their own: no image has a compiler. Bytecode is compiled here because the containers run as a
# user that may write nowhere but in mounted volumes and /tmp. That user is a number: no name is looked up for it, so
# LOGNAME says one to libraries that insist (they would look into /etc/passwd and fail).
#
# The package index and the certificate bundle come as build secrets (optional): `package-index` is a file of shell
# assignments such as UV_DEFAULT_INDEX=..., `certificates` a bundle of PEM certificates. Neither enters a layer.
ARG PYTHON_BASE=python:3.12-slim
# Has g++, and no newer C library than PYTHON_BASE.
ARG COMPILER_BASE=python:3.12
ARG GAUDI_BASE=set-build-argument-GAUDI_BASE-to-the-gaudi-pytorch-image
# Images of the stages with these names, made earlier: a change of code then looks at nothing but code.
ARG OPERATOR_ENVIRONMENT=operator-environment
ARG CPU_ENVIRONMENT=cpu-environment
# Has the folder /kernels.
ARG KERNELS=kernels

# What builds and never ships: the installer and the wheel builder, locked as everything else.
FROM ${PYTHON_BASE} AS tools
COPY requirements/build.txt /requirements/
RUN --mount=type=secret,id=package-index --mount=type=secret,id=certificates \
    set -a; [ ! -f /run/secrets/package-index ] || . /run/secrets/package-index; \
    python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --require-hashes -r /requirements/build.txt

# The wheel, unpacked once for all targets: it holds no compiled code, so one tree serves every Python.
FROM tools AS app
COPY pyproject.toml README.md LICENSE /src/
COPY engine /src/engine
COPY operator /src/operator
RUN cd /src && /opt/tools/bin/python -m hatchling build -t wheel -d /dist \
    && python3 -m venv --without-pip /opt/venv \
    && /opt/tools/bin/uv pip install --quiet --offline --no-cache --no-deps --python /opt/venv/bin/python --target /opt/app /dist/*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/app

FROM tools AS operator-dependencies
COPY images/install.sh /images/
COPY requirements/operator.txt /requirements/
RUN --mount=type=cache,id=uv,target=/var/cache/uv \
    --mount=type=secret,id=package-index --mount=type=secret,id=certificates \
    sh /images/install.sh /requirements/operator.txt

FROM ${PYTHON_BASE} AS operator-environment
COPY --from=operator-dependencies /opt/venv /opt/venv

FROM ${OPERATOR_ENVIRONMENT} AS operator
COPY --from=app /opt/app /opt/app
ENV PATH=/opt/app/bin:/opt/venv/bin:$PATH HOME=/tmp LOGNAME=hpu PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["/opt/app/bin/hpu-operator"]

FROM tools AS cpu-dependencies
COPY images /images
COPY requirements/cpu.txt /requirements/
RUN --mount=type=cache,id=uv,target=/var/cache/uv \
    --mount=type=secret,id=package-index --mount=type=secret,id=certificates \
    sh /images/install.sh /requirements/cpu.txt --without-cuda

FROM ${PYTHON_BASE} AS cpu-environment
COPY --from=cpu-dependencies /opt/venv /opt/venv

FROM ${COMPILER_BASE} AS kernels
COPY engine/hpu_engine/device/cpu/native /src
RUN python3 /src/build.py /kernels

# COPY takes no variable.
FROM ${KERNELS} AS kernels-at-hand

FROM ${CPU_ENVIRONMENT} AS engine-cpu
COPY --from=kernels-at-hand /kernels /opt/app/hpu_engine/device/cpu/native
COPY --from=app /opt/app /opt/app
ENV PATH=/opt/app/bin:/opt/venv/bin:$PATH HOME=/tmp LOGNAME=hpu PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["/opt/app/bin/hpu-engine"]

# The base brings Python, torch and the Gaudi bridge. Our packages go into an environment of their own in front of it and
# never into the base's, and the lock `engine` has no torch in it.
FROM ${GAUDI_BASE} AS gaudi-dependencies
USER 0
COPY --from=tools /opt/tools/bin/uv /opt/tools/bin/uv
COPY images/install.sh /images/
COPY requirements/engine.txt /requirements/
RUN --mount=type=cache,id=uv,target=/var/cache/uv \
    --mount=type=secret,id=package-index --mount=type=secret,id=certificates \
    sh /images/install.sh /requirements/engine.txt --system-site-packages

FROM ${GAUDI_BASE} AS engine-gaudi
COPY --from=gaudi-dependencies /opt/venv /opt/venv
COPY --from=app /opt/app /opt/app
ENV PATH=/opt/app/bin:/opt/venv/bin:$PATH HOME=/tmp LOGNAME=hpu PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["/opt/app/bin/hpu-engine"]
