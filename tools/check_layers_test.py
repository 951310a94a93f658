#!/usr/bin/env python3
"""Seeds each kind of violation into a small tree and expects exactly it to be reported."""
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(os.getcwd(), "tools"))
import check_layers  # noqa: E402


def check(tree):
    """The violations of a tree given as {path: content}."""
    with tempfile.TemporaryDirectory() as root:
        for path, content in tree.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as out:
                out.write(content)
        return list(check_layers.violations(root))


CLEAN = {
    "core/a.h": "#pragma once\n#include <vector>\n#include \"absl/status/status.h\"\n",
    "rpc/server.cc": '#include "core/a.h"\n#include <grpcpp/server.h>\n',
    "worker/doors/shard_service.cc": '#include "client/cpp/x.h"\n#include <grpcpp/support/status.h>\n',
    "worker/worker_main.cc": '#include <CLI/CLI.hpp>\n#include <grpcpp/server.h>\n',
    "server/store/sqlite_store.cc": "#include <sqlite3.h>\n",
    "kernels/sum/slot_sum_simd.cc": "#include <hwy/highway.h>\n",
    "kernels/sum/slot_sum_cuda.cu": "#include <cuda_runtime.h>\n",
    "client/cpp/grpc_transport.cc": '#include <grpcpp/channel.h>\n',
    "tests/e2e_test.cc": '#include "worker/w.h"\n#include "server/s.h"\n#include <nlohmann/json.hpp>\n',
    "examples/digits/trainer.cc": '#include "client/cpp/client.h"\n#include <CLI/CLI.hpp>\n',
}


class CheckLayersTest(unittest.TestCase):
    def test_clean_tree_passes(self):
        self.assertEqual(check(CLEAN), [])

    def expect(self, path, content, *parts):
        found = check({**CLEAN, path: content})
        self.assertEqual(len(found), 1, found)
        for part in parts:
            self.assertIn(part, found[0])

    def test_every_forbidden_folder_is_found(self):
        for folder, allowed in check_layers.ALLOWED.items():
            for other in sorted(set(check_layers.ALLOWED) - allowed - {folder}):
                self.expect(f"{folder}/bad.cc", f'#include "{folder}/own.h"\n\n#include "{other}/x.h"\n',
                            f"{folder}/bad.cc:3: {folder}/ may not include {other}/x.h")

    def test_threads_where_the_thread_sanitizer_does_not_look_are_found(self):
        for text in "std::thr" "ead t;", '#include "core/base/thr' 'ead.h"':
            for path in "core/job/bad.cc", "proto/bad_test.cc", "checkpoint/bad.h":
                self.expect(path, text + "\n", f"{path}:1:", "NO_THREADS")
        for path in "core/base/good.cc", "worker/good.cc", "kernels/good_test.cc":
            self.assertEqual(check({**CLEAN, path: "std::thr" "ead t;\n"}), [])

    def test_the_table_of_support_names_tests_that_are_there(self):
        tree = {**CLEAN, "core/a/BUILD": 'cc_test(name = "good_test")\n'}
        table = "core/job/support_table.h"
        self.assertEqual(check({**tree, table: '"//core/a:good_test"\n'}), [])
        for label in "//core/a:bad_test", "//core/b:good_test":
            found = check({**tree, table: f'#pragma once\n"{label}"\n'})
            self.assertEqual(found, [f"{table}:2: there is no test {label}"])

    def test_a_room_includes_those_below_it_alone(self):
        for folder, rooms in check_layers.ROOMS.items():
            homes = [os.path.join(folder, room).rstrip("/") for room in rooms]
            for i, home in enumerate(homes):
                for other in homes[:i + 1]:
                    self.assertEqual(check({**CLEAN, f"{home}/a.cc": f'#include "{other}/x.h"\n'}), [], (home, other))
                for other in homes[i + 1:]:
                    self.expect(f"{home}/bad.cc", f'\n#include "{other}/x.h"\n', f"{home}/bad.cc:2: {home}/ may not include {other}/x.h")

    def test_tests_include_every_room(self):
        for path in ("core/base/a_test.cc", "core/mesh/a_model.h", "worker/lead/testing/a.h"):
            top = path.split("/")[0]
            self.assertEqual(check({**CLEAN, path: f'#include "{top}/{check_layers.ROOMS[top][-1]}/x.h"\n'}), [])

    def test_a_folder_with_too_many_files_is_found(self):
        for folder, ending in (("worker/step", ".cc"), ("tests/testing", ".h"), ("python/shardmesh/torch", ".py"), ("bench", ".cu")):
            tree = {f"{folder}/a{i}{ending}": "" for i in range(check_layers.MAX_FILES)}
            self.assertEqual(check({**tree, f"{folder}/inner/b.h": "", f"{folder}/README.md": ""}), [])
            found = check({**tree, f"{folder}/b.h": ""})
            self.assertEqual(found, [f"{folder}:1: has {check_layers.MAX_FILES + 1} source files; split it, at most {check_layers.MAX_FILES} are readable"])

    def test_the_table_counts_files_and_arrows(self):
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.join(root, "core/job"))
            for name in ("a.h", "a_test.cc"):
                with open(os.path.join(root, "core/job", name), "w", encoding="utf-8") as out:
                    out.write('#include "core/base/ids.h"\n')
            lines = list(check_layers.table(root))
        self.assertIn(["core/job", "2", "1", "base"], [line.split() for line in lines])
        self.assertEqual(lines[-1], f"{sum(map(len, check_layers.ROOMS.values()))} rooms, 1 arrows")

    def test_every_confined_library_is_found(self):
        for header in ("grpcpp/server.h", "grpc/grpc.h", "sqlite3.h", "hwy/highway.h", "cuda_runtime.h", "cuda.h", "CLI/CLI.hpp",
                       "nlohmann/json.hpp", "pybind11/stl.h", "Python.h"):
            self.expect("server/coordinator/coordinator.cc", f"#include <{header}>\n", "server/coordinator/coordinator.cc:1: ", f"{header} belongs only in")
            self.expect("core/bad.h", f'#include <string>\n  #  include "{header}"\n', "core/bad.h:2: ", header)

    def test_confined_library_beside_its_home_is_found(self):
        self.expect("server/store/store.h", "#include <sqlite3.h>\n", "sqlite3.h belongs only in")
        self.expect("kernels/sum/slot_sum.cc", "#include <hwy/targets.h>\n", "hwy/targets.h belongs only in")
        self.expect("kernels/rules.h", "#include <hwy/highway.h>\n", "hwy/highway.h belongs only in")
        self.expect("worker/lead/engine.cc", "#include <grpcpp/channel.h>\n", "grpcpp/channel.h belongs only in")
        self.expect("worker/service_parts.cc", "#include <grpcpp/channel.h>\n", "grpcpp/channel.h belongs only in")

    def test_sleep_in_a_test_is_found(self):
        for call in ("std::this_thread::sleep_for(1s)", "absl::SleepFor(x)", "usleep (5)", "sleep(1)", "nanosleep(&t, 0)"):
            self.expect("core/x_test.cc", f"int a;\n{call};\n", "core/x_test.cc:2: ", "in a test")
        self.assertEqual(check({"core/x.cc": "usleep(5);", "core/y_test.cc": "asleep(5); Sleeper(1);"}), [])

    def test_wall_clock_is_found(self):
        for path, text in (("worker/lead/engine.cc", "absl::No" "w()"), ("core/x.h", "std::chrono::system_cl" "ock::now()"), ("local/a_test.cc", "CLOCK_REAL" "TIME"),
                           ("python/shardmesh/x.py", "time.ti" "me()"), ("server/store.cc", "std::ti" "me(nullptr)"), ("examples/a.py", "datetime.now" "()"),
                           ("worker/a.cc", "gettimeof" "day(&now, 0)")):
            self.expect(path, f"a\nb = {text};\n", f"{path}:2: ", "MonotonicNow()")

    def test_wall_clock_where_it_is_needed_passes(self):
        self.assertEqual(check({**CLEAN, "client/cli/commands/lease_command.cc": "absl::No" "w()"}), [])
        self.assertEqual(check({**CLEAN, "worker/a.py": "end = time.monotonic(); process.timeout(3)"}), [])

    def test_class_of_many_functions_is_found(self):
        functions = "".join(f"  int f{i}(int a = (1)) const {{ return a; }}  // f(\n" for i in range(24))
        body = "class A {\n public:\n  A() = default;\n" + functions + "  std::function<void()> kept;\n{more} private:\n  void g();\n};\n"
        self.assertEqual(check({"core/job/a.h": body.replace("{more}", "")}), [])
        self.expect("core/job/a.h", body.replace("{more}", "  template <class T>\n  void h(T);\n"), "core/job/a.h:1: ", "A has 26 public functions")

    def test_number_of_hosts_is_found(self):
        self.expect("worker/step/decide.cc", "a\nbool Alone(HostRanks r) { return r.num_ho" "sts == 1; }\n", "worker/step/decide.cc:2: ", "HostRanks::alone()")

    def test_number_of_hosts_where_bytes_move_passes(self):
        for path in ("worker/lead/several.cc", "worker/transport/group.h", "core/job/support.cc", "worker/step/testing/hosts.h"):
            self.assertEqual(check({path: "int f(HostRanks r) { return r.num_ho" "sts; }\n"}), [])

    def test_device_is_found(self):
        self.expect("worker/step/bad.cc", "// a device, in words\nint x = on_devi" "ce();\n", "worker/step/bad.cc:2: on_devi" "ce")
        self.expect("worker/pass/bad.h", "#pragma once\nclass Devi" "cePass;\n", "worker/pass/bad.h:2: Devi" "cePass")

    def test_device_where_bytes_lie_passes(self):
        for path in "worker/memory/ok.cc", "worker/pass/device/ok.cc", "worker/doors/ok.cc", "client/cpp/ok.cc", "worker/step/ok_test.cc":
            self.assertEqual(check({**CLEAN, path: "int x = on_devi" "ce();\n"}), [])

    def test_machine_path_is_found(self):
        for path in ("/ho" + "me/ann/x", "/wo" + "rk/main", "/ro" + "ot/x"):
            self.expect("docs/page.md", f"see\n\n{path}\n", "docs/page.md:3: ", "path of one machine")
        self.assertEqual(check({"docs/page.md": "bench/work/x and /tmp/x and /workers/1\n"}), [])

    def test_hidden_and_generated_folders_are_left_out(self):
        bad = '#include "server/x.h"\n'
        self.assertEqual(check({"core/.cache/a.h": bad, "bazel-out/core/a.h": bad, ".git/core/a.h": bad}), [])

    def test_the_rules_name_each_other(self):
        for folder, allowed in check_layers.ALLOWED.items():
            self.assertLessEqual(allowed, set(check_layers.ALLOWED), folder)
            self.assertNotIn(folder, allowed)
        # No cycle between the folders of the product.
        product = {f: a for f, a in check_layers.ALLOWED.items() if f not in ("tests", "bench")}
        while product:
            free = [f for f, a in product.items() if not a & set(product)]
            self.assertTrue(free, f"cycle among {sorted(product)}")
            for folder in free:
                del product[folder]


if __name__ == "__main__":
    unittest.main()
