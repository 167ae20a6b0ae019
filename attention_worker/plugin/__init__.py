"""The vLLM plugin: `register` is its entry point, and runs in every process of an engine.

    pip install 'dsa-indexer[vllm]'
    vllm serve ...

Nothing of it is imported before it is known that this version of vLLM is served.
"""

import logging

from attention_worker import vllm_compat
from attention_worker.plugin.settings import PluginSettings, asks_for_plugin
from indexer_client.settings import ClientSettings

logger = logging.getLogger(__name__)


_LOGGING = ("attention_worker", "indexer_client", "indexer_service", "ipc_handoff")


def register() -> None:
    """Offer TRITON_MLA_SPARSE, and replace vLLM's indexer where it is asked for or does not run.

    Without a variable set, on a platform where vLLM's own indexer runs, models, operators and the
    chosen backend are what they were.
    """
    vllm_compat.share_log(*_LOGGING)
    version = vllm_compat.installed_version()
    why_not = vllm_compat.why_not(version, allow_untested=PluginSettings().allow_untested)
    if why_not is not None:
        logger.warning("dsa-indexer stays out of vLLM: %s", why_not)
        return
    vllm_compat.register_backend()
    vllm_compat.append_to_automatic_choice()
    if vllm_compat.on_cpu():
        from attention_worker.plugin import cpu_platform

        cpu_platform.complete()
    if asks_for_plugin(ClientSettings()) or not vllm_compat.native_path_works():
        from attention_worker.plugin.indexer_op import install

        install()
        vllm_compat.use_generic_models()
