"""The router as a process: loads the tokenizer, opens the control plane and HTTP, runs until a signal."""

import asyncio
import logging
import signal
import time
from pathlib import Path

from aiohttp import web

from pdserve.cluster import event_loop
from pdserve.cluster.config import RouterConfig
from pdserve.cluster.keys import read_keys
from pdserve.cluster.logs import start_logging
from pdserve.cluster.messages import Facts
from pdserve.core.checkpoint import checkpoint_digest, tokenizer_digest
from pdserve.core.errors import ConfigError
from pdserve.core.model_config import load_generation_defaults, load_model_config
from pdserve.router.api_keys import ApiKeys
from pdserve.router.app import FrontDoorLimits, create_app, make_runner
from pdserve.router.generation import ModelCard
from pdserve.router.service import RouterService
from pdserve.router.tokenizer import TextModel

log = logging.getLogger(__name__)

CLOSE_S = 2.0


def run(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ConfigError or ModelError at start."""
    start_logging()
    return event_loop.run(_serve(config))


async def _serve(config: RouterConfig) -> int:
    started = time.monotonic()
    model_dir = config.serving.model
    assert model_dir is not None, "the command line resolves the demo model"
    model = load_model_config(model_dir)
    max_model_len = config.serving.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(f"--max-model-len {max_model_len} is above the model's {model.max_position_embeddings}")
    text = TextModel.load(model_dir)
    facts = Facts(checkpoint_digest(model_dir), tokenizer_digest(model_dir), "", b"", "", ())
    keys = read_keys(config.control.key_file)
    service = RouterService(config.control, config.admission, config.slo, config.baseline, facts, max_model_len, keys)
    card = ModelCard(_served_name(config, model_dir), max_model_len, model.vocab_size)
    limits = FrontDoorLimits(max_body_bytes=config.http.max_body_bytes)
    api_keys = ApiKeys.read(config.http.api_key_file) if config.http.api_key_file else None
    app = create_app(card, service, text, load_generation_defaults(model_dir), limits, api_keys)
    runner = make_runner(app, shutdown_timeout_s=CLOSE_S)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.http.host, config.http.port)
        await site.start()
        log.info(
            "model %s, context %d tokens, HTTP on http://%s in %.1f s",
            card.name,
            max_model_len,
            _bound(runner),
            time.monotonic() - started,
        )
        await service.run(stop)
    finally:
        await runner.cleanup()
    return 0


def _bound(runner: web.AppRunner) -> str:
    """host:port that was given, also for port 0."""
    host, port = runner.addresses[0][:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _served_name(config: RouterConfig, model_dir: Path) -> str:
    return config.serving.served_model_name or model_dir.name
