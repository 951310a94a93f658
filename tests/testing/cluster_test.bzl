"""cluster_test: a test with real processes."""

def cluster_test(name, deps = [], tags = [], **kwargs):
    """`name`.cc, with a Cluster and its jobs; `deps` and `tags` are added to what each of them has."""
    native.cc_test(
        name = name,
        size = "medium",
        srcs = [name + ".cc"],
        tags = ["no_tsan"] + tags,  # the distribution's gRPC is not built for it
        deps = [
            "//client/cpp:client",
            "//core/job:job",
            "//core/base:matchers",
            "//core/base:status",
            "//tests/testing:cluster",
            "//tests/testing/training:training",
            "@system//:absl",
            "@system//:gtest",
        ] + deps,
        **kwargs
    )
