# The base is an argument, so that it can be your own, or pinned by digest, which a tag is not:
#   docker build --build-arg BASE=python:3.13-slim@sha256:<digest> -t bloomgate .
# (`docker buildx imagetools inspect python:3.13-slim` prints the digest.) Any image like it will do: glibc, and
# Python 3.11 or newer with venv and pip. Both stages need the same one: a virtual environment points at its
# interpreter by path.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
WORKDIR /src
COPY . .
RUN ["sh", "deploy/install.sh", "/opt/bloomgate"]

FROM ${BASE}
# The uid is fixed, so that a volume keeps its owner from one image to the next. The data directory is made
# here: a new named volume takes over its owner and mode.
RUN groupadd --gid 10001 bloomgate \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin bloomgate \
 && install -d -o bloomgate -g bloomgate -m 0700 /var/lib/bloomgate \
 && python3 -m pip uninstall --yes --quiet --root-user-action=ignore pip
COPY --from=build /opt/bloomgate /opt/bloomgate

# In a container it listens on every interface, so it starts only with TLS and tokens or client certificates, as in
# docker-compose.yml; or with BLOOMGATED__INSECURE=true, if whoever can reach it may do everything.
ENV PATH=/opt/bloomgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    BLOOMGATED__DATA_DIR=/var/lib/bloomgate \
    BLOOMGATED__LISTEN=0.0.0.0:50051 \
    BLOOMGATED__HTTP=0.0.0.0:9464
USER 10001:10001
VOLUME ["/var/lib/bloomgate"]
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
# Asks /readyz on the port of the environment above. Recovering large filters takes a while: within the
# start period a failure does not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["bloomgated", "healthcheck"]
ENTRYPOINT ["bloomgated"]
CMD ["serve"]
