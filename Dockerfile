# A target per part: worker, api, controller.
#
#     docker build --target worker -t adascale-worker:dev .
#
# `worker` is what an image with a program of your own is built FROM: it holds torch, the agent, and the
# examples. Programs go to /app; more packages, such as the scikit-learn of most examples, come by
#
#     USER 0
#     RUN pip install ...
#     USER 65532
#
# No image holds a compiler, none runs as root, and all of them run on a read-only root file system with
# something to write to at /tmp.

# For images that never change, give it with a digest: --build-arg BASE=python:3.11-slim@sha256:...
ARG BASE=python:3.11-slim
# The part of which the target `sbom` lists the packages.
ARG PART=api

# What all parts run on.
FROM ${BASE} AS base
RUN echo 'adascale:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'adascale:x:65532:' >> /etc/group
# USER is for libraries that ask for the user's name where a cluster gives a number that nobody has.
ENV PATH=/opt/adascale/bin:$PATH \
    VIRTUAL_ENV=/opt/adascale \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    TMPDIR=/tmp \
    USER=adascale
WORKDIR /app

# What builds them, and stays out of them.
FROM ${BASE} AS tools
# Of a package index of your own.
ARG UV_DEFAULT_INDEX
ARG PIP_INDEX_URL
# The same as in the Makefile.
ARG UV=0.13.8
RUN python -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir --quiet --disable-pip-version-check uv==${UV}
ENV PATH=/opt/uv/bin:$PATH \
    UV_NATIVE_TLS=true \
    UV_LINK_MODE=copy

# What each part needs, with the versions and hashes of requirements.lock, and none that is not there.
FROM tools AS locks
ARG UV_DEFAULT_INDEX
WORKDIR /locks
COPY pyproject.toml requirements.lock ./
RUN --mount=type=cache,target=/root/.cache/uv \
    sed 's/ ; .*/ \\/' requirements.lock > pinned \
    && for part in worker api controller; do \
        cp requirements.lock $part.lock \
        && uv pip compile --group image-$part --generate-hashes --no-annotate --no-header \
            --no-emit-index-url --no-emit-find-links --quiet --output-file $part.lock \
        || exit 1; \
        if grep -vxF -f pinned $part.lock; then echo "not in requirements.lock; run: make lock" >&2; exit 1; fi; \
    done

FROM tools AS wheel
ARG UV_DEFAULT_INDEX
WORKDIR /source
COPY pyproject.toml DESCRIPTION.md LICENSE ./
COPY core core
COPY client client
COPY worker worker
COPY api api
COPY controller controller
RUN --mount=type=cache,target=/root/.cache/uv uv build --quiet --wheel --out-dir /wheel

FROM base AS worker
# Another index of torch, such as PyTorch's own for CPUs, whose torch is 200 MB and needs no libraries of NVIDIA. Its
# packages are not those of the lock, so their hashes are not checked.
ARG TORCH_INDEX=""
ARG UV_DEFAULT_INDEX
# In layers of their own, and before our code, so that a change of ours is a small thing to build and to pull.
COPY --from=locks /locks/worker.lock /opt/requirements.lock
RUN --mount=type=bind,from=tools,source=/opt/uv/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,source=deploy/images/finish.py,target=/usr/local/bin/finish.py \
    --mount=type=cache,target=/root/.cache/uv \
    python -m venv /opt/adascale \
    && export HOME=/root UV_NATIVE_TLS=true UV_LINK_MODE=copy \
    && awk -v skipped="${TORCH_INDEX:+torch|triton|nvidia-.*|cuda-.*}" \
        '/^[^ ]/ { skip = skipped != "" && $0 ~ "^(" skipped ")==" } !skip' /opt/requirements.lock > /tmp/lock \
    && uv pip install --quiet --require-hashes --requirement /tmp/lock \
    && if [ -n "$TORCH_INDEX" ]; then \
        uv pip install --quiet --no-deps --index-url "$TORCH_INDEX" "$(grep -o '^torch==[^ ]*' /opt/requirements.lock)"; fi \
    && rm /tmp/lock \
    && python /usr/local/bin/finish.py trim
COPY --from=wheel /wheel /opt/wheel
RUN --mount=type=bind,from=tools,source=/opt/uv/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,source=deploy/images/finish.py,target=/usr/local/bin/finish.py \
    uv pip install --quiet --no-cache --compile-bytecode --no-index --no-deps /opt/wheel/*.whl \
    && PYTHONDONTWRITEBYTECODE= python /usr/local/bin/finish.py compile adascale_worker adascale_storage adascale torch._dynamo --without kopf kubernetes fastapi \
    && ! command -v cc gcc g++ clang
COPY examples examples
USER 65532:65532
ENTRYPOINT ["adascale-agent", "--"]
LABEL org.opencontainers.image.title="adascale-worker" \
      org.opencontainers.image.description="Runs a PyTorch program as a replica of an elastic job" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM base AS api
ARG UV_DEFAULT_INDEX
COPY --from=locks /locks/api.lock /opt/requirements.lock
RUN --mount=type=bind,from=tools,source=/opt/uv/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,source=deploy/images/finish.py,target=/usr/local/bin/finish.py \
    --mount=type=cache,target=/root/.cache/uv \
    python -m venv --without-pip /opt/adascale \
    && HOME=/root UV_NATIVE_TLS=true UV_LINK_MODE=copy uv pip install --quiet --require-hashes --requirement /opt/requirements.lock \
    && python /usr/local/bin/finish.py trim
COPY --from=wheel /wheel /opt/wheel
RUN --mount=type=bind,from=tools,source=/opt/uv/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,source=deploy/images/finish.py,target=/usr/local/bin/finish.py \
    uv pip install --quiet --no-cache --compile-bytecode --no-index --no-deps /opt/wheel/*.whl \
    && PYTHONDONTWRITEBYTECODE= python /usr/local/bin/finish.py compile adascale_api --without torch kopf \
    && ! command -v cc gcc g++ clang
# With glibc's defaults, threads leave much memory unused in arenas of their own, and the memory of large
# messages is kept after their end.
ENV MALLOC_ARENA_MAX=2 MALLOC_MMAP_THRESHOLD_=131072
USER 65532:65532
EXPOSE 8265
ENTRYPOINT ["adascale-api"]
CMD ["--host", "0.0.0.0"]
LABEL org.opencontainers.image.title="adascale-api" \
      org.opencontainers.image.description="The metrics service: gains of elastic jobs, and where their replicas meet" \
      org.opencontainers.image.licenses="Apache-2.0"

# The operator makes its calls with the client's `ApiClient` alone, so the generated calls are left out.
FROM base AS controller
ARG UV_DEFAULT_INDEX
COPY --from=locks /locks/controller.lock /opt/requirements.lock
RUN --mount=type=bind,from=tools,source=/opt/uv/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,source=deploy/images/finish.py,target=/usr/local/bin/finish.py \
    --mount=type=cache,target=/root/.cache/uv \
    python -m venv --without-pip /opt/adascale \
    && HOME=/root UV_NATIVE_TLS=true UV_LINK_MODE=copy uv pip install --quiet --require-hashes --requirement /opt/requirements.lock \
    && python /usr/local/bin/finish.py trim kubernetes/aio/client/api
COPY --from=wheel /wheel /opt/wheel
RUN --mount=type=bind,from=tools,source=/opt/uv/bin/uv,target=/usr/local/bin/uv \
    --mount=type=bind,source=deploy/images/finish.py,target=/usr/local/bin/finish.py \
    uv pip install --quiet --no-cache --compile-bytecode --no-index --no-deps /opt/wheel/*.whl \
    && PYTHONDONTWRITEBYTECODE= python /usr/local/bin/finish.py compile adascale_controller --without torch fastapi \
    && ! command -v cc gcc g++ clang
# With glibc's default, threads leave much memory unused in arenas of their own.
ENV MALLOC_ARENA_MAX=2
USER 65532:65532
ENTRYPOINT ["adascale"]
CMD ["operator"]
LABEL org.opencontainers.image.title="adascale-controller" \
      org.opencontainers.image.description="The operator: moves elastic jobs between replica counts by their gain" \
      org.opencontainers.image.licenses="Apache-2.0"

# The bill of materials of an image: the Python packages that it adds to its base. `.ci/release` builds it for each PART.
FROM tools AS cyclonedx
ARG UV_DEFAULT_INDEX
ARG CYCLONEDX=7.5.0
RUN python -m venv /opt/cyclonedx && uv pip install --quiet --no-cache --python /opt/cyclonedx cyclonedx-bom==${CYCLONEDX}

FROM ${PART} AS described
ARG VERSION PROGRAM
# The image has the version of the release, and its own program runs.
RUN test "$(python -c 'from importlib.metadata import version; print(version("adascale-operator"))')" = "$VERSION" \
    && "$PROGRAM" --help > /dev/null
USER 0
# Not a mount: buildah does not mount a stage whose layers it has from an earlier build.
COPY --from=cyclonedx /opt/cyclonedx /opt/cyclonedx
RUN /opt/cyclonedx/bin/cyclonedx-py environment --output-reproducible --output-format JSON --output-file /sbom.cdx.json \
        /opt/adascale/bin/python

FROM scratch AS sbom
COPY --from=described /sbom.cdx.json /
