# docker build -t ssm-tune . && docker run --gpus all -it -v "$PWD:/data" ssm-tune sft demo
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/ssm-tune
COPY . .
RUN ./install_gpu.sh /opt/venv

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /data
ENTRYPOINT ["ssm-tune"]
CMD ["--help"]
