"""The Kubernetes objects that install a picker, for values of the Helm chart's names.

    values    what can be asked for, with defaults; strict
    checks    what the kinds of values cannot say: timings that add up, flags that the manifests own
    sizing    workers from the CPU request, /dev/shm from workers, table and index
    files     the texts of ConfigMaps: Envoy beside the picker, the plugins' configuration
    workload  Deployment, ConfigMaps, Service, PodDisruptionBudget
    access    ServiceAccount, roles, NetworkPolicy
    field     InferencePool, objectives, HTTPRoute, DestinationRule, ServiceMonitor
    render    all of them, in the order in which they are applied

This is the one place that says what the objects are. kustomize's base and overlays are written from it, and the chart, whose templates
must be Go's, is held to it by tests: for the same values helm, kustomize and `epp manifests` give the same objects.

What this does not do: talk to a cluster.
"""
