# Build:           docker build -t medusa .       (with PyPI's torch, which runs on CUDA GPUs and on CPUs)
# A smaller one:   docker build -t medusa --build-arg TORCH_INDEX=URL .    (pytorch.org lists its index of CPU builds)
# Serve:           docker run -p 8000:8000 -v medusa:/data medusa            (CUDA: --gpus all)
# Other commands:  docker run -it -v medusa:/data medusa chat
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN pip install --no-cache-dir "${TORCH}" ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[serve,train,grammar]"
# Models, drafters and runs; the default model is fetched there at first use.
ENV MEDUSA_HOME=/data/cache HF_HOME=/data/hub
RUN useradd --create-home medusa && mkdir /data && chown medusa /data
USER medusa
WORKDIR /data
VOLUME /data
EXPOSE 8000
ENTRYPOINT ["medusa"]
CMD ["serve", "--host", "0.0.0.0"]
