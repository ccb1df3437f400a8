"""torchvision, timm, segmentation-models-pytorch, ultralytics, kornia, MONAI."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn


def device() -> torch.device:
    """Return the device that programs choose."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def torchvision_detection(name: str) -> Callable[[], None]:
    """Train a detector for two steps, then detect; the documentation's example."""
    import torchvision

    extra: dict[str, Any] = {"min_size": 96, "max_size": 128}
    if name.startswith("ssd"):
        extra = {}
    elif name == "keypointrcnn_resnet50_fpn":
        extra["num_keypoints"] = 5

    def program() -> None:
        model = getattr(torchvision.models.detection, name)(
            weights=None, weights_backbone=None, num_classes=3, **extra
        ).to(device())
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.001, momentum=0.9
        )
        images = [torch.rand(3, 96, 96, device=device()), torch.rand(3, 80, 112, device=device())]
        targets = []
        for image in images:
            boxes = torch.tensor([[4.0, 6.0, 60.0, 70.0], [10.0, 10.0, 40.0, 30.0]])
            target = {"boxes": boxes, "labels": torch.tensor([1, 2])}
            if name.startswith("maskrcnn"):
                target["masks"] = torch.ones(2, *image.shape[1:], dtype=torch.uint8)
            if name.startswith("keypoint"):
                target["keypoints"] = torch.tensor([[[20.0, 20.0, 1.0]] * 5] * 2)
            targets.append({key: value.to(device()) for key, value in target.items()})
        model.train()
        for _ in range(2):
            losses = model(images, targets)
            loss = sum(value for value in losses.values())
            if not torch.isfinite(loss):
                raise SystemExit(f"Loss is {loss.item()}, stopping training")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for output in model(images):
                print({key: value.shape for key, value in output.items()})
                print([round(score, 3) for score in output["scores"].tolist()[:3]])

    return program


def torchvision_segmentation(name: str) -> Callable[[], None]:
    """Train a segmentation model for two steps, with the reference script's criterion."""
    import torchvision

    def program() -> None:
        model = getattr(torchvision.models.segmentation, name)(
            weights=None, weights_backbone=None, num_classes=4, aux_loss=None
        ).to(device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.train()
        for _ in range(2):
            image = torch.rand(2, 3, 64, 64, device=device())
            target = torch.randint(0, 4, (2, 64, 64), device=device())
            target[:, :4] = 255
            loss = nn.functional.cross_entropy(model(image)["out"], target, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        a, b = target.flatten(), model(image)["out"].argmax(1).flatten()
        k = (a >= 0) & (a < 4)
        matrix = torch.bincount(4 * a[k] + b[k], minlength=16).reshape(4, 4).float()
        iou = torch.diag(matrix) / (matrix.sum(1) + matrix.sum(0) - torch.diag(matrix))
        print(f"mean IoU: {iou.mean().item() * 100:.1f}")

    return program


def torchvision_transforms() -> Callable[[], None]:
    """Augment a batch with boxes by transforms v2, then mix it up and train on it."""
    from torchvision import models, tv_tensors
    from torchvision.transforms import v2

    def program() -> None:
        transforms = v2.Compose(
            [
                v2.RandomResizedCrop(size=(32, 32), antialias=True),
                v2.RandomHorizontalFlip(p=0.5),
                v2.RandAugment(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
            ]
        )
        images = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8, device=device())
        batch = torch.stack([transforms(image) for image in images])
        boxes = tv_tensors.BoundingBoxes(
            torch.tensor([[2, 2, 20, 30]], device=device()), format="XYXY", canvas_size=(48, 48)
        )
        v2.Compose([v2.RandomCrop(32), v2.SanitizeBoundingBoxes(labels_getter=None)])(
            tv_tensors.Image(images[0]), boxes
        )
        mixed, labels = v2.RandomChoice([v2.CutMix(num_classes=5), v2.MixUp(num_classes=5)])(
            batch, torch.randint(0, 5, (4,), device=device())
        )
        model = models.shufflenet_v2_x0_5(num_classes=5).to(device())
        nn.functional.cross_entropy(model(mixed), labels).backward()

    return program


def torchvision_raft() -> Callable[[], None]:
    """Train RAFT's small optical flow for a step."""
    from torchvision.models.optical_flow import raft_small

    def program() -> None:
        model = raft_small(weights=None).to(device())
        images = torch.rand(2, 1, 3, 128, 128, device=device())
        flows = model(images[0], images[1], num_flow_updates=2)
        loss = sum((flow - torch.zeros_like(flow)).abs().mean() for flow in flows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return program


def timm_training(name: str) -> Callable[[], None]:
    """Train a timm model with mixup, an EMA and its optimizer and schedule factories."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import AverageMeter, ModelEmaV2, accuracy

    def program() -> None:
        model = timm.create_model(name, num_classes=10).to(device())
        size = model.pretrained_cfg["input_size"][-1]
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
        scheduler = CosineLRScheduler(optimizer, t_initial=10, warmup_t=2)
        mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)
        ema, meter, top = ModelEmaV2(model), AverageMeter(), AverageMeter()
        criterion = SoftTargetCrossEntropy()
        for step in range(2):
            images = torch.rand(2, 3, size, size, device=device())
            labels = torch.randint(0, 10, (2,), device=device())
            mixed, target = mixup(images, labels)
            loss = criterion(model(mixed), target)
            optimizer.zero_grad()
            loss.backward()
            timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            ema.update(model)
            scheduler.step(step)
            meter.update(loss.item(), images.size(0))
        model.eval()
        with torch.no_grad():
            first, _ = accuracy(model(images), labels, topk=(1, 5))
            top.update(first.item(), 2)
        print(f"Loss: {meter.avg:.4f} Acc@1: {top.avg:>7.3f}")

    return program


def smp_training(architecture: str) -> Callable[[], None]:
    """Train a segmentation model and count its metrics, as the examples do."""
    import segmentation_models_pytorch as smp

    def program() -> None:
        model = smp.create_model(
            architecture, encoder_name="resnet18", encoder_weights=None, in_channels=3, classes=1
        ).to(device())
        loss_function = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        for _ in range(2):
            image = torch.rand(2, 3, 64, 64, device=device())
            mask = (torch.rand(2, 1, 64, 64, device=device()) > 0.5).float()
            assert mask.max() <= 1.0
            assert mask.min() >= 0
            logits = model(image)
            loss = loss_function(logits, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        predicted = (logits.sigmoid() > 0.5).float()
        counts = smp.metrics.get_stats(predicted.long(), mask.long(), mode="binary")
        print("IoU", smp.metrics.iou_score(*counts, reduction="micro-imagewise").item())

    return program


def ultralytics_model(configuration: str, what: str) -> Callable[[], None]:
    """Train, validate or predict with a YOLO model on eight pictures."""
    from PIL import Image
    from ultralytics import YOLO, settings

    settings.update({"sync": False, "tensorboard": False})
    root = Path("data").absolute()
    random = numpy.random.default_rng(0)
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (root / kind / part).mkdir(parents=True, exist_ok=True)
        for index in range(8):
            pixels = random.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(root / "images" / part / f"{index}.jpg")
            label = "0 0.5 0.5 0.4 0.3\n1 0.3 0.6 0.2 0.2\n"
            if "seg" in configuration:
                label = "0 0.2 0.2 0.7 0.2 0.7 0.7 0.2 0.7\n"
            (root / "labels" / part / f"{index}.txt").write_text(label)
    Path("data.yaml").write_text(
        f"path: {root}\ntrain: images/train\nval: images/val\nnames: {{0: cat, 1: dog}}\n"
    )

    def program() -> None:
        model = YOLO(configuration)
        chosen = 0 if torch.cuda.is_available() else "cpu"
        common: dict[str, Any] = {"imgsz": 64, "device": chosen, "verbose": False}
        if what == "train":
            model.train(
                data="data.yaml",
                epochs=1,
                batch=4,
                workers=0,
                plots=False,
                val=True,
                amp=False,
                project=str(Path("runs").absolute()),
                **common,
            )
        elif what == "val":
            print(model.val(data="data.yaml", workers=0, plots=False, batch=4, **common).box.map)
        else:
            for result in model.predict(str(root / "images" / "val" / "0.jpg"), **common):
                print(len(result.boxes), result.boxes.xyxy.tolist()[:2])

    return program


def kornia_augmentation() -> Callable[[], None]:
    """Augment on the device and train through the augmentation, as kornia's tutorial does."""
    import kornia.augmentation as K
    import kornia.losses

    def program() -> None:
        augment = nn.Sequential(
            K.RandomHorizontalFlip(p=0.5),
            K.RandomAffine(degrees=30.0, p=0.7),
            K.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.9),
            K.RandomErasing(p=0.5),
        ).to(device())
        images = torch.rand(4, 3, 32, 32, device=device())
        model = nn.Conv2d(3, 3, 3, padding=1).to(device())
        loss = kornia.losses.ssim_loss(model(augment(images)), images, 5)
        loss.backward()
        print(loss.item())

    return program


def monai_segmentation() -> Callable[[], None]:
    """Train a 3-d UNet, then infer with a sliding window and count the Dice metric."""
    from monai.data import decollate_batch
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss
    from monai.metrics import DiceMetric
    from monai.networks.nets import UNet
    from monai.transforms import AsDiscrete, Compose

    def program() -> None:
        model = UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1).to(device())
        loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(2):
            image = torch.rand(2, 1, 32, 32, 32, device=device())
            label = (torch.rand(2, 1, 32, 32, 32, device=device()) > 0.5).long()
            optimizer.zero_grad()
            loss = loss_function(model(image), label)
            loss.backward()
            optimizer.step()
        metric = DiceMetric(include_background=False, reduction="mean")
        post = Compose([AsDiscrete(argmax=True, to_onehot=2)])
        post_label = Compose([AsDiscrete(to_onehot=2)])
        model.eval()
        with torch.no_grad():
            outputs = sliding_window_inference(image, (16, 16, 16), 4, model)
            predicted = [post(one) for one in decollate_batch(outputs)]
            metric(y_pred=predicted, y=[post_label(one) for one in decollate_batch(label)])
        print("dice", metric.aggregate().item())
        metric.reset()

    return program


def monai_transforms() -> Callable[[], None]:
    """Run MONAI's dictionary transforms on device tensors with meta data."""
    from monai.data import MetaTensor
    from monai.transforms import (
        Compose,
        RandAffined,
        RandCropByPosNegLabeld,
        RandGaussianNoised,
        ScaleIntensityd,
        Spacingd,
        ToDeviced,
    )

    def program() -> None:
        transforms = Compose(
            [
                ToDeviced(keys=["image", "label"], device=device()),
                Spacingd(keys=["image", "label"], pixdim=(2.0, 2.0, 2.0), mode="nearest"),
                ScaleIntensityd(keys="image"),
                RandCropByPosNegLabeld(
                    ["image", "label"], "label", spatial_size=(8, 8, 8), num_samples=2
                ),
                RandAffined(keys=["image", "label"], prob=1.0, rotate_range=0.1, mode="nearest"),
                RandGaussianNoised(keys="image", prob=1.0),
            ]
        )
        transforms.set_random_state(seed=0)
        image = MetaTensor(torch.rand(1, 24, 24, 24))
        label = MetaTensor((torch.rand(1, 24, 24, 24) > 0.7).float())
        for one in transforms({"image": image, "label": label}):
            print(one["image"].shape, one["label"].sum().item())

    return program


def facenet_like_losses(name: str) -> Callable[[], None]:
    """Train embeddings with a miner and a loss of pytorch-metric-learning, then its tester."""
    from pytorch_metric_learning import distances, losses, miners, reducers
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    def program() -> None:
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        distance = distances.CosineSimilarity()
        reducer = reducers.ThresholdReducer(low=0)
        if name == "triplet":
            loss_function = losses.TripletMarginLoss(0.2, distance=distance, reducer=reducer)
            miner = miners.TripletMarginMiner(0.2, distance=distance, type_of_triplets="semihard")
        elif name == "multi-similarity":
            loss_function, miner = losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner()
        elif name == "arcface":
            loss_function, miner = losses.ArcFaceLoss(4, 8).to(device()), None
        else:
            loss_function, miner = losses.NTXentLoss(), miners.BatchHardMiner()
        for epoch in range(2):
            data = torch.randn(16, 16, device=device())
            labels = torch.randint(0, 4, (16,), device=device())
            optimizer.zero_grad()
            embeddings = model(data)
            if miner is None:
                loss = loss_function(embeddings, labels)
            else:
                mined = miner(embeddings, labels)
                loss = loss_function(embeddings, labels, mined)
                print(f"Epoch {epoch} mined = {getattr(miner, 'num_triplets', len(mined))}")
            loss.backward()
            optimizer.step()
            print(f"Loss = {loss}")
        with torch.no_grad():
            known = model(data)
        accuracies = AccuracyCalculator(include=("precision_at_1",), k=1, device=device())
        print(accuracies.get_accuracy(known, labels, known, labels, True))

    return program
