"""Makes the Kubernetes objects that install a picker: renders the Helm chart for values and for short options.

    values    the chart's values as types, from which its JSON Schema is generated
    helm      runs `helm template` on the chart
    command   `epp manifests`: turns options into values, then checks the flags and the configuration of the pod as `epp serve` does

The chart in `deploy/helm/endpoint-picker` alone defines the objects, and the rules about values that exclude each other. The base and the
overlays of kustomize are generated from it. This package sends no request to a cluster.
"""
