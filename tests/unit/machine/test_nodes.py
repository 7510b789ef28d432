from lightning_cxl.machine.topology import (
    node_free_bytes,
    read_nodes,
)

NODE = "sys/devices/system/node"


def test_read_nodes_of_a_machine_with_two_cards(machine):
    dram, first, second = read_nodes(machine("3node"))
    assert (dram.node_id, dram.has_cpus, dram.distance) == (0, True, 10)
    assert (first.node_id, first.has_cpus, first.distance) == (1, False, 24)
    assert (second.node_id, second.has_cpus, second.distance) == (2, False, 24)
    assert first.capacity_bytes == 1032020 * 1024
    assert (first.read_bytes_per_s, first.write_bytes_per_s) == (28672e6, 28672e6)
    assert (first.read_latency_ns, first.write_latency_ns) == (250, 250)
    assert not any(node.movable for node in (dram, first, second))


def test_distance_is_from_the_nearest_node_with_cpus(machine):
    root = machine("3node", {f"{NODE}/node1/cpulist": "1\n", f"{NODE}/node2/distance": "31 17 10\n"})
    assert read_nodes(root)[2].distance == 17


def test_distance_columns_are_the_online_nodes(machine):
    # node 1 is off, so the second column is node 2's own
    root = machine("3node", {f"{NODE}/online": "0,2", f"{NODE}/has_memory": "0,2", f"{NODE}/node2/distance": "28 10\n"})
    nodes = read_nodes(root)
    assert [node.node_id for node in nodes] == [0, 2]
    assert nodes[1].distance == 28


def test_node_without_memory_still_counts_as_a_cpu_node(machine):
    # a socket without DIMMs: its CPUs are the nearest to node 1
    root = machine("3node", {f"{NODE}/has_memory": "0-1", f"{NODE}/node2/cpulist": "2-3\n"})
    nodes = read_nodes(root)
    assert [node.node_id for node in nodes] == [0, 1]
    assert nodes[1].distance == 24


def test_movable_is_a_node_without_normal_memory(machine):
    root = machine("3node", {f"{NODE}/has_normal_memory": "0,2\n"})
    assert [node.movable for node in read_nodes(root)] == [False, True, False]


def test_ratings_prefer_access_class_1_and_fall_back_to_0(machine):
    root = machine(
        "2node",
        {
            f"{NODE}/node1/access0/initiators/read_bandwidth": "1000\n",
            f"{NODE}/node1/access0/initiators/read_latency": "777\n",
            f"{NODE}/node1/access1/initiators/read_latency": None,
            f"{NODE}/node1/access1/initiators/write_latency": None,
        },
    )
    card = read_nodes(root)[1]
    assert card.read_bytes_per_s == 28672e6
    assert card.read_latency_ns == 777
    assert card.write_latency_ns is None


def test_kernel_without_numa_is_one_node(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1024 kB\nMemAvailable: 512 kB\n")
    (node,) = read_nodes(tmp_path)
    assert (node.node_id, node.has_cpus, node.capacity_bytes, node.movable) == (0, True, 1 << 20, False)


def test_node_free_counts_file_cache_and_keeps_headroom(machine):
    meminfo = ["MemTotal: 1048576 kB", "MemFree: 524288 kB", "Active(file): 1024 kB", "Inactive(file): 2048 kB"]
    root = machine("2node", {f"{NODE}/node1/meminfo": "\n".join(f"Node 1 {line}" for line in meminfo)})
    capacity = 1 << 30
    assert node_free_bytes(root, 1, capacity) == (512 << 20) + (3 << 20) - capacity // 64
