"""What MXNet's names of a KVStore are here: its kinds, arguments and methods."""

from __future__ import annotations

KIND_ALIASES = {
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "nccl": "device",
    "local_allreduce_device": "device",
    "dist": "dist_sync",
    "dist_sync_device": "dist_device_sync",
    "dist_device_async": "dist_async",
}

# Kinds that have no equal here, and which one to use.
_ALL_REDUCE = "use 'dist_sync', or 'device' in one process; both are all-reduces"
OTHER_KINDS = {
    "p3": "use 'dist_sync', for XLA itself sends one gradient while it computes the next",
    "horovod": _ALL_REDUCE,
    "byteps": _ALL_REDUCE,
    "teststore": "use 'local'",
}

ARGUMENTS = {
    "out": "arrays are not written to, so write value = kv.pull(store, key), or devices=[...] for a copy on each",
    "priority": "leave it out, for the compiler orders what is sent",
    "ignore_sparse": "leave it out; kv.row_sparse_pull reads some rows",
    "name": "call it kind",
    "compression_params": "give that dict as second argument, kv.set_gradient_compression(store, params)",
    "optimizer": "give it as second argument, kv.set_optimizer(store, tx)",
    "row_id": "call it row_ids",
}

# Of `Module.fit` and `gluon.Trainer`, for the functions of `train`.
TRAINING_ARGUMENTS = {
    "num_epoch": "write epochs= in train.fit",
    "begin_epoch": "leave it out: train.fit(checkpoint_dir=) goes on where a run ended",
    "eval_data": "write test_data= in train.fit",
    "eval_metric": "return the metrics in the dict of loss_fn",
    **dict.fromkeys(
        ("batch_end_callback", "epoch_end_callback", "eval_end_callback", "eval_batch_end_callback"),
        "write callbacks= in train.fit",
    ),
    "optimizer_params": "give them to the optimizer: mxnet.sgd(0.1, momentum=0.9)",
    **dict.fromkeys(("ctx", "context"), "write devices=jax.devices() in train.start"),
    "arg_params": "give params as the first argument of train.start",
    "aux_params": "write model_state= in train.start",
    **dict.fromkeys(("initializer", "allow_missing", "force_init", "force_rebind"), "leave it out: give params"),
    "compression_params": "call it compression, of train.start",
    "update_on_kvstore": "leave it out: the store always has the updater",
    "monitor": "leave it out: mxnet.load_symbol(file).compare(outputs) names the first layer that differs",
    "sparse_row_id_fn": "leave it out: kv.row_sparse_pull reads some rows",
}

_RETURNS = {
    "store": "init push flush place set_updater set_optimizer set_gradient_compression",
    "value": "pull row_sparse_pull",
    "store, value": "pushpull broadcast",
}
_METHODS = {
    **{name: f"{result} = kv.{name}(store, ...)" for result, names in _RETURNS.items() for name in names.split()},
    "_set_updater": "store = kv.set_updater(store, updater)",
    "type": "store.kind",
    "rank": "kv.rank()",
    "num_workers": "kv.num_workers()",
    "_barrier": "kv.barrier(name)",
    "barrier": "kv.barrier(name)",
    "save_optimizer_states": "jp.checkpoint.save(path, store)",
    "load_optimizer_states": "store = jp.checkpoint.restore(path, store)",
    "is_capable": "nothing, every kind takes an optimizer",
    "_send_command_to_servers": "nothing, there are no servers",
}


def line_for(method: str) -> str | None:
    """What to write in place of a method of MXNet's store. None: it has no such method."""
    return _METHODS.get(method)
