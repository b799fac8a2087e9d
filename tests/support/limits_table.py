"""Rows of the tables of limits (docs/reference/limits*.md), except those of the gateway."""

from __future__ import annotations

ROWS: dict[str, tuple[str, ...]] = {
    "accept queue": ("pilotlight.net.listen.BACKLOG",),
    "queue of a model": ("autoscaler.contract.QueueLimits.calls_max", "autoscaler.contract.QueueLimits.bytes_max"),
    "time in the queue": ("autoscaler.contract.QueueLimits.wait_seconds_max",),
    "engine response: first byte, stall, whole response": (
        "autoscaler.contract.Clocks.first_byte_seconds_max",
        "autoscaler.contract.Clocks.stall_seconds_max",
        "autoscaler.contract.Clocks.response_seconds_max",
    ),
    "report of a gateway: id of the gateway, names, counts, rows; number of gateways": (
        "autoscaler.contract.NAME_CHARS_MAX",
        "autoscaler.contract.COUNT_MAX",
        "autoscaler.contract.ROWS_MAX",
        "autoscaler.server.gateways.GATEWAYS_MAX",
    ),
    "slots of a gateway whose process or pod is not watched": ("autoscaler.contract.REPORT_EXPIRY_S",),
    "object of the API server: nesting; size; Events about unreadable objects": (
        "autoscaler.kubernetes.safe_decoding.DEPTH_MAX",
        "autoscaler.kubernetes.safe_decoding.BYTES_MAX",
    ),
    "list of the API server: objects per page; size of a page; of a page with one object, or from a server that "
    "ignores the page size": (
        "autoscaler.kubernetes.api.PAGE",
        "autoscaler.kubernetes.api.PAGE_BYTES_MAX",
        "autoscaler.kubernetes.api.LIST_BYTES_MAX",
    ),
    "other response of the API server, or line of a watch; error response; its message": (
        "autoscaler.kubernetes.api.RESPONSE_BYTES_MAX",
        "autoscaler.kubernetes.api.ERROR_BYTES_MAX",
        "autoscaler.kubernetes.api.MESSAGE_CHARS_MAX",
    ),
    "`/metrics` of a gateway": ("autoscaler.server.ops.SCRAPE_BYTES_MAX",),
    "start attempts in one series of starts of a model": (
        "autoscaler.spec.model.StartLimits.retries",
        "autoscaler.spec.model.StartLimits.seconds_max",
    ),
    "quarantine of a model that caused an internal error": (),
    "models quarantined because of one internal error": ("autoscaler.controller.fault_attribution.CULPRITS_MAX",),
    "GPU that a DRA driver partitions: how long a replica waits for the free part of a GPU on which another replica is "
    "starting; GPUs vacated per plan for replicas that need a whole GPU": (
        "autoscaler.placement.partitionable_gpus.REST_S",
        "autoscaler.rearrange.vacate_gpu.EMPTYING_MAX",
    ),
    "replicas requested per tick": ("autoscaler.planner.reconcile.WANTS_MAX",),
    "migrations for defragmentation": (
        "autoscaler.rearrange.defragmentation.EVERY_S",
        "autoscaler.rearrange.replica_migration.AGAIN_S",
    ),
    "search for migrations": (
        "autoscaler.rearrange.defragmentation.KINDS_MAX",
        "autoscaler.rearrange.defragmentation.WANTS_MAX",
        "autoscaler.rearrange.defragmentation.PLACES_MAX",
        "autoscaler.rearrange.defragmentation.CANDIDATES_MAX",
        "autoscaler.rearrange.defragmentation.MOVES_MAX",
        "autoscaler.rearrange.defragmentation.PROOFS_MAX",
    ),
    "search for consolidation of paid capacity": ("autoscaler.rearrange.consolidation.LEASES_MAX",),
    "search for a smaller set of victims": (
        "autoscaler.placement.minimal_eviction.STEPS_MAX",
        "autoscaler.placement.minimal_eviction.MOVERS_MAX",
        "autoscaler.placement.minimal_eviction.PLACES_MAX",
    ),
    "MIG repartitioning of nodes": (
        "autoscaler.rearrange.mig_repartition.EVERY_S",
        "autoscaler.rearrange.mig_repartition.NODE_EVERY_S",
        "autoscaler.rearrange.mig_repartition.NODES_MAX",
        "autoscaler.rearrange.mig_repartition.WANTS_MAX",
        "autoscaler.queries.mig_status.CUT_S_MAX",
        "autoscaler.queries.mig_status.TRIES_MAX",
    ),
    "Pilotlight's configurations in the ConfigMap of mig-manager": (
        "autoscaler.drivers.kubernetes.inventory.mig_manager.KEPT_MAX",
    ),
    "cached sets of Tenants for GPU isolation": ("autoscaler.placement.model.tenant_isolation.TRUSTS_MAX",),
    "observations that wait for a step of the loop": ("autoscaler.controller.inbox.INBOX_MAX",),
    "input of the learner": (
        "autoscaler.placement.learning.expected_demand.KINDS_MAX",
        "autoscaler.placement.learning.training.ALIKE_MAX",
        "autoscaler.placement.learning.training.LANES_MAX",
        "autoscaler.placement.learning.learner.WEIGHTS_MAX",
    ),
    "a run of the learner": (
        "pilotlight.processes.learner.CPU_S_MAX",
        "pilotlight.processes.learner_runner.LEARNS_S_MAX",
        "pilotlight.processes.learner.MEMORY_BYTES_MAX",
        "autoscaler.placement.learning.training.AGAIN_S",
        "autoscaler.placement.learning.training.FAILED_S",
    ),
    "what-if of the running system: body, requests of one model, steps, concurrent queries": (
        "autoscaler.server.what_if.BODY_BYTES_MAX",
        "autoscaler.planner.what_if.CALLS_MAX",
        "autoscaler.planner.what_if.AHEAD_ROUNDS_MAX",
    ),
    "plans per step of the loop": ("autoscaler.controller.loop.ROUNDS_MAX",),
    "metrics of an engine, result of a Prometheus query: interval; time; size; concurrent requests; lines of one "
    "metric, their length": (
        "autoscaler.demand.scaling_signals.SCRAPE_S",
        "autoscaler.signals.scraper.READ_S_MAX",
        "autoscaler.signals.scraper.RESPONSE_BYTES_MAX",
        "autoscaler.signals.scraper.AT_ONCE",
        "autoscaler.signals.metric_responses.SAMPLES_MAX",
        "autoscaler.signals.metric_responses.LINE_BYTES_MAX",
    ),
    "scaling signal that was not read; time over which a rate is computed": (
        "autoscaler.demand.scaling_signals.SIGNAL_EXPIRY_S",
        "autoscaler.signals.totals.RATE_WINDOW_S",
    ),
    "readiness probes": ("autoscaler.drivers.probes.PROBES_PER_S_MAX", "autoscaler.drivers.probes.PROBE_SECONDS_MAX"),
    "SIGTERM to SIGKILL": ("autoscaler.state.lifecycle.STOP_GRACE_S", "pilotlight.processes.autoscaler.ENGINE_GRACE_S"),
    "drain of a replica": ("autoscaler.queries.gateway_reports.DRAIN_SECONDS_MAX",),
    "log of state changes": ("autoscaler.explain.decision_log.ROWS_MAX",),
    "recorded start durations": ("autoscaler.demand.model_history.STARTS_MAX",),
    "log of an engine; logs of ended engines": (
        "autoscaler.drivers.local.engine_logs.BYTES_MAX",
        "autoscaler.drivers.local.engine_logs.FILES_MAX",
    ),
    "request events on disk": ("pilotlight.processes.request_event_file.BYTES_MAX",),
    "registry: manifest; response of a token service; error body": (
        "artifacts.oci.manifest.MANIFEST_BYTES_MAX",
        "artifacts.registry.auth.TOKEN_BYTES_MAX",
        "artifacts.http.transport.ERROR_BYTES_MAX",
    ),
    "registry: consecutive attempts of a request; total wait between them, wait because of one "
    "`Retry-After`; redirects": (
        "artifacts.http.retry.TRIES_MAX",
        "artifacts.http.retry.WAIT_S_MAX",
        "artifacts.http.retry.RETRY_AFTER_S_MAX",
        "artifacts.http.url_policy.REDIRECTS_MAX",
    ),
    "registry: referrers, pages of each list": (
        "artifacts.registry.referrers.REFERRERS_MAX",
        "artifacts.registry.referrers.PAGES_MAX",
    ),
    "download: concurrent requests; parts of a blob; retries of a byte range that is downloaded much "
    "slower than others": (
        "artifacts.download.concurrency.MOST",
        "artifacts.oci.blob_progress.PARTS_MAX",
        "artifacts.download.concurrency.REPEATS_MAX",
    ),
    "credential helper": (
        "artifacts.credentials.credential_helpers.PROGRAM_S_MAX",
        "artifacts.credentials.credential_helpers.PROGRAM_BYTES_MAX",
    ),
    "cloud credentials: response; connection and response of a metadata service; registries cached": (
        "artifacts.credentials.clouds.cloud.ANSWER_BYTES_MAX",
        "artifacts.credentials.clouds.metadata.CONNECT_S",
        "artifacts.credentials.clouds.metadata.WHOLE_S",
        "artifacts.credentials.clouds.cloud.KEPT_MAX",
    ),
    "GGUF header": (
        "artifacts.formats.gguf.HEADER_BYTES_MAX",
        "artifacts.formats.gguf.KEYS_MAX",
        "artifacts.formats.gguf.TENSORS_MAX",
    ),
    "safetensors header; index of safetensors files; `config.json`; header or index that has escapes or characters "
    "outside of ASCII": (
        "artifacts.formats.hf_config.HEADER_BYTES_MAX",
        "artifacts.formats.hf_config.INDEX_BYTES_MAX",
        "artifacts.formats.hf_config.CONFIG_BYTES_MAX",
        "artifacts.formats.hf_config.WIDE_BYTES_MAX",
    ),
    "manifest of an artifact; its config; its layers; entries of an index; nested indexes": (
        "artifacts.oci.manifest.MANIFEST_BYTES_MAX",
        "artifacts.oci.manifest.CONFIG_BYTES_MAX",
        "artifacts.oci.manifest.LAYERS_MAX",
        "artifacts.oci.manifest.ENTRIES_MAX",
        "artifacts.oci.manifest.INDEX_DEPTH_MAX",
    ),
    "one layer of an artifact; all layers": (
        "artifacts.oci.descriptor.BLOB_BYTES_MAX",
        "artifacts.dialects.artifact_contents.BYTES_MAX",
    ),
    "JSON from a registry": (
        "artifacts.oci.strict_json.DEPTH_MAX",
        "artifacts.oci.strict_json.PARTS_MAX",
        "artifacts.oci.descriptor.ANNOTATIONS_MAX",
    ),
    "signatures of a manifest: time to find them; manifests and layers read to find signatures by "
    "referrers, and as many to find them by tag": (
        "artifacts.fetch.verify_signatures.SECONDS_MAX",
        "artifacts.fetch.verify_signatures.LOOKS_MAX",
    ),
    "one signature: bundle; payload; subjects; PEM of a key": (
        "artifacts.signatures.bundles.BUNDLE_BYTES_MAX",
        "artifacts.signatures.payloads.PAYLOAD_BYTES_MAX",
        "artifacts.signatures.payloads.SUBJECTS_MAX",
        "artifacts.signatures.public_keys.PEM_BYTES_MAX",
    ),
    "transparency log entry: body; hashes; timestamps, size of each; trusted root: size of the file, certificates of "
    "one authority": (
        "artifacts.signatures.transparency_log.BODY_BYTES_MAX",
        "artifacts.signatures.transparency_log.HASHES_MAX",
        "artifacts.signatures.timestamps.TIMESTAMPS_MAX",
        "artifacts.signatures.timestamps.BYTES_MAX",
        "artifacts.signatures.trust_root.ROOT_BYTES_MAX",
        "artifacts.signatures.trust_root.CHAIN_MAX",
    ),
    "archive in an artifact: members; size of the long name or of the pax records of one member; zeros after its end": (
        "artifacts.archives.tar_reader.ENTRIES_MAX",
        "artifacts.archives.tar_reader.META_BYTES_MAX",
        "artifacts.archives.tar_reader.TRAILING_BYTES_MAX",
    ),
    "decompression: output per input byte; output that is exempt from the ratio; zstd window": (
        "artifacts.archives.decompress.RATIO_MAX",
        "artifacts.archives.decompress.FREE_BYTES",
        "artifacts.archives.decompress.WINDOW_BYTES_MAX",
    ),
    "packing: files in one folder; size of a Modelfile; concurrent blob uploads": (
        "pilotlight.cli.weights.pack.FILES_MAX",
        "pilotlight.cli.import_.FILE_BYTES_MAX",
        "artifacts.pack.push_artifact.AT_ONCE",
    ),
    "path of a file in an artifact": (
        "artifacts.safe_paths.PATH_BYTES_MAX",
        "artifacts.safe_paths.PARTS_MAX",
        "artifacts.safe_paths.NAME_BYTES_MAX",
    ),
    "weight store: wait for the lock of the whole store, for the lock of one copy; repeated selections "
    "of copies to evict because a selected copy came into use": (
        "artifacts.store.copies.LOCK_S_MAX",
        "artifacts.store.copies.LEASE_S_MAX",
        "artifacts.store.reservations.TRIES_MAX",
    ),
    "weight store: age of a registry's access grant, while the registry is unreachable; grants cached": (
        "artifacts.store.permission_cache.FRESH_S",
        "artifacts.store.permission_cache.AWAY_S_MAX",
        "artifacts.store.permission_cache.PERMITS_MAX",
    ),
    "weight store: data of an incomplete pull": ("artifacts.store.copies.LEFT_S_MAX",),
    "agent: concurrent pulls; copies reported; time for which weights that no Model needs any more are "
    "protected from eviction": (
        "pilotlight.agent.weights.fetch.PULLS_MAX",
        "pilotlight.agent.weights.keeper.COPIES_MAX",
        "pilotlight.agent.weights.keeper.LINGER_S",
    ),
    "agent, per report: names of copies; rows about weights; names of images": (
        "pilotlight.agent.weights.report_limits.COPIES_BYTES_MAX",
        "pilotlight.agent.weights.report_limits.WEIGHTS_BYTES_MAX",
        "autoscaler.agent_contract.IMAGES_MAX",
        "pilotlight.agent.weights.report_limits.IMAGES_BYTES_MAX",
    ),
    "weights requested from an agent at a time; of these, inspections": (
        "autoscaler.weights.desired.WANTS_BYTES_MAX",
        "autoscaler.weights.inspection.LOOKS_MAX",
    ),
    "`artifact` of a Model or an adapter": ("autoscaler.documents.document_rules.ARTIFACT_CHARS_MAX",),
    "image inspected by an agent: one read, number of reads; bytes of a compressed layer": (
        "artifacts.fetch.image_file_list.SPAN_BYTES",
        "artifacts.fetch.image_file_list.SPANS_MAX",
        "artifacts.fetch.image_file_list.BEGIN_BYTES",
    ),
    "agent: concurrent inspections; interval after an inspection that failed or found no image": (
        "pilotlight.agent.weights.fetch.LOOKS_MAX",
        "pilotlight.agent.weights.keeper.LOOK_AGAIN_S",
    ),
    "agent: cached inspections; wait for an unreachable registry": (
        "pilotlight.agent.weights.inspect.HEADERS_MAX",
        "artifacts.store.store.AWAY_WAIT_S",
    ),
    "agent that was selected for an inspection: without a report; without a result": (
        "autoscaler.weights.inspection.SILENT_S",
        "autoscaler.weights.inspection.SLOW_S",
    ),
    "agent: one header in a report; all headers in a report": (
        "pilotlight.models.header_report.CHARS_MAX",
        "pilotlight.agent.weights.report_limits.HEADERS_CHARS_MAX",
    ),
    "wait of a model for the memory requirement in its artifact's header": ("autoscaler.planner.reconcile.READ_S_MAX",),
    "wait of a replica for an agent that fetches weights; for the way in which pods can mount them": (
        "autoscaler.weights.replica_weights.AGENT_S_MAX",
        "autoscaler.controller.weights_wait.LOOK_S_MAX",
    ),
    "weight store: locked files per artifact": ("artifacts.store.store.LOCKS_MAX",),
    "weight store: wait for a registry that does not respond, with an earlier grant": (
        "artifacts.store.store.AWAY_WAIT_S",
    ),
    "checksums of blob parts: lists read; size of a list": (
        "artifacts.pack.chunk_sums.LISTS_MAX",
        "artifacts.pack.chunk_sums.LIST_BYTES_MAX",
    ),
    "weight store: cached digests of references": ("artifacts.store.tag_cache.MEANINGS_MAX",),
    "weight store: recorded checksums of copies from sources without checksums": (
        "artifacts.sources.digest_cache.SUMS_MAX",
    ),
    "files of a Hugging Face repository, or below a key of a bucket": ("artifacts.sources.file_selection.FILES_MAX",),
    "pages of the Hub's list of files, of a bucket's list; rows of the Hub's list": (
        "artifacts.sources.huggingface.PAGES_MAX",
        "artifacts.sources.s3.PAGES_MAX",
        "artifacts.sources.huggingface.ROWS_MAX",
    ),
    "XML of S3 and STS; its elements": ("artifacts.http.xml.BYTES_MAX", "artifacts.http.xml.ELEMENTS_MAX"),
    "peers: asked per pull; concurrent files served by a node": (
        "artifacts.peers.selection.PEERS_MAX",
        "artifacts.peers.server.STREAMS_MAX",
    ),
    "agents: peers named for a pull; artifacts whose list of peers is cached, age of such a list": (
        "autoscaler.weights.peers.PEERS_MAX",
        "autoscaler.weights.peers.KEPT_MAX",
        "autoscaler.weights.peers.KEPT_S",
    ),
    "time for which a peer is not asked again: it was busy; it failed; it lacks the blob; wait for a "
    "peer that is still fetching the blob": (
        "artifacts.peers.selection.BUSY_S",
        "artifacts.peers.selection.BUSY_S_MAX",
        "artifacts.peers.selection.FAILED_S",
        "artifacts.peers.selection.LACKS_S",
        "artifacts.peers.selection.COMING_S_MAX",
    ),
    "peer that does not read": ("artifacts.peers.server.STEP_BYTES", "artifacts.peers.server.STEP_S_MAX"),
    "archive that is rebuilt from its files for peers: bytes outside of files; recipe": (
        "artifacts.archives.archive_recipe.REST_BYTES_MAX",
        "artifacts.archives.archive_recipe.RECIPE_BYTES_MAX",
    ),
    "header of a GGUF file in a registry": ("artifacts.fetch.remote_header.BYTES_MAX",),
    "headers of one file, folder or remote artifact: CPU time": ("artifacts.formats.cpu_time_limit.CPU_S_MAX",),
    "names in all archives of an artifact": ("artifacts.fetch.registry_files.NAMES_MAX",),
    "engine images pulled by an agent: concurrent; per node, per message; one pull; back-off after a failure": (
        "pilotlight.agent.kubelet.image_pull.PULLS_MAX",
        "pilotlight.agent.kubelet.image_pull.WANTED_MAX",
        "autoscaler.weights.image_prepull.NODE_MAX",
        "pilotlight.agent.kubelet.image_pull.PULL_S_MAX",
        "pilotlight.agent.kubelet.image_pull.AGAIN_S",
        "pilotlight.agent.kubelet.image_pull.AGAIN_S_MAX",
    ),
    "weight store: `copy.json`": ("artifacts.store.copy_record.RECORD_BYTES_MAX",),
    "reference to an artifact": ("artifacts.reference.TEXT_CHARS_MAX", "artifacts.reference.NAME_CHARS_MAX"),
    "providers; offers and capacity orders of one provider; orders queued for one provider": (
        "autoscaler.spec.capacity.PROVIDERS_MAX",
        "autoscaler.state.capacity.OFFERS_MAX",
        "autoscaler.state.capacity.LISTED_MAX",
        "autoscaler.providers.runner.ORDERS_MAX",
    ),
    "orders of one provider that wait in a queue (ProvisioningRequest, Kueue)": (
        "autoscaler.providers.provisioning_request.provider.WAIT_MAX",
    ),
    "one request to a provider; interval between lists": (
        "autoscaler.providers.runner.CALL_S_MAX",
        "autoscaler.providers.runner.LIST_S_MAX",
    ),
    "per plan: unplaced replicas considered, kinds of them, offers tried, capacity ordered": (
        "autoscaler.provisioning.provisioner.WANTS_MAX",
        "autoscaler.provisioning.provisioner.KINDS_MAX",
        "autoscaler.provisioning.offer_selection.TRIALS_MAX",
        "autoscaler.provisioning.provisioner.ORDERS_MAX",
    ),
    "capacity order that is missing in its provider's list; time for which a new leader orders nothing "
    "because a provider has not listed its orders": (
        "autoscaler.state.capacity.UNSEEN_S",
        "autoscaler.provisioning.provisioner.UNLISTED_S",
    ),
    "Redfish service: size of a response; resource blocks (units of attachable devices), pages of the "
    "list of resource blocks; concurrent requests": (
        "autoscaler.providers.redfish.client.ANSWER_BYTES_MAX",
        "autoscaler.providers.redfish.schema.MEMBERS_MAX",
        "autoscaler.providers.redfish.inventory.PAGES_MAX",
        "autoscaler.providers.redfish.client.AT_ONCE",
    ),
    "devices of a fabric, published as ResourceSlices: devices per node; interval of updates, of checks "
    "that the slices exist; time for which slices of an earlier leader stay while the fabric does not respond": (
        "autoscaler.provisioning.fabric_device_claims.PUBLISHED_MAX",
        "autoscaler.providers.redfish.dra_publisher.LOOK_S",
        "autoscaler.providers.redfish.dra_publisher.SWEEP_S",
        "autoscaler.provisioning.fabric_device_claims.UNKNOWN_S",
    ),
    "time for the scheduler to allocate a device that was attached for a claim": (
        "autoscaler.provisioning.fabric_device_claims.CLAIM_S",
    ),
    "Redfish service: connection, read, change; task": (
        "autoscaler.providers.redfish.client.CONNECT_S_MAX",
        "autoscaler.providers.redfish.client.READ_S_MAX",
        "autoscaler.providers.redfish.client.CHANGE_S_MAX",
        "autoscaler.providers.redfish.client.TASK_S_MAX",
    ),
    "MachineSets and MachineDeployments that another component scales: interval of polls if such groups "
    "exist, if none exist; time for which Pilotlight waits for the new nodes of a group": (
        "autoscaler.providers.machine_set_watcher.LOOK_S",
        "autoscaler.providers.machine_set_watcher.NONE_S",
        "autoscaler.capacity.group_machines_in_flight.GROW_S",
    ),
    "attached GPU on its node: visible; interval between bus scans; driver command": (
        "pilotlight.agent.gpu.hotplug.VISIBLE_S",
        "pilotlight.agent.gpu.hotplug.SCAN_S",
        "pilotlight.agent.gpu.pci_bus.COMMAND_S",
    ),
    "attach that is accepted and not executed; attach attempts in total; attach after its release": (
        "autoscaler.providers.redfish.attach_detach.NOTHING_S",
        "autoscaler.providers.redfish.attach_detach.GIVEN_UP_S",
        "autoscaler.providers.redfish.provider.LATE_S",
    ),
    "kinds of offers with recorded lead times; lead times per kind": (
        "autoscaler.fold.capacity.KINDS_MAX",
        "autoscaler.state.capacity.STARTS_MAX",
    ),
    "documents": ("autoscaler.spec.yaml.TEXT_CHARS_MAX", "autoscaler.spec.yaml.NUMBER_CHARS_MAX"),
    "file of a reference; values of all references": (
        "pilotlight.models.document_loading.VALUE_BYTES_MAX",
        "autoscaler.documents.variable_and_file_references.VALUES_CHARS_MAX",
    ),
    "folder of `serve`: levels; files and folders": (
        "pilotlight.models.model_files.DEPTH_MAX",
        "pilotlight.models.model_files.ENTRIES_MAX",
    ),
    "response of the operations port to a command": (
        "pilotlight.net.ops_client.BYTES_MAX",
        "pilotlight.net.ops_client.TIMEOUT_S",
        "pilotlight.cli.plan.LIVE_TIMEOUT_S",
    ),
    "line of command output; of a log": (
        "pilotlight.safe_output.LINE_CHARACTERS_MAX",
        "pilotlight.safe_output.LINE_BYTES_MAX",
    ),
    "local driver: free space on the disk of the state directory for a start; check interval": (
        "autoscaler.drivers.local.disk_space.BYTES_MIN",
        "autoscaler.drivers.local.disk_space.LOOK_S",
    ),
    "named pipe given as a file: without data": ("pilotlight.bounded_files.PIPE_WAIT_S",),
    "certificate file; token file": (
        "pilotlight.net.certificates.TOKEN_FILE_BYTES_MAX",
        "pilotlight.net.certificates.TOKENS_MAX",
    ),
    "stored keys": ("pilotlight.cli.keys.KEYS_MAX",),
}
"""Each row's first cell, and the bounds that it states; none if it is a rule or the machine's own number."""
